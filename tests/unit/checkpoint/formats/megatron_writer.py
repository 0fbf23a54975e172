"""Files as Megatron writes them, from whole tensors of our model: its other ways than those in ``golden``.

Written from Megatron's documented names and shapes, without a line of what reads them.
"""

from __future__ import annotations

from argparse import Namespace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_megatron import TransformerConfig

Tensors = dict[str, Tensor]


def padded(rows: Tensor, multiple: int) -> Tensor:
    return torch.cat([rows, rows.new_full((-len(rows) % multiple, rows.shape[1]), 7.0)])


def layer(ours: Tensors, number: int, config: TransformerConfig, *, fused_norms: bool) -> Tensors:
    """A layer in Megatron's names; experts as ``experts.N``."""
    x = {name.removeprefix(f"layers.{number}."): t for name, t in ours.items() if name.startswith(f"layers.{number}.")}
    experts = "mlp.router.weight" in x
    first = "self_attention.linear_qkv.layer_norm_" if fused_norms else "input_layernorm."
    second = "mlp.linear_fc1.layer_norm_" if fused_norms and not experts else "pre_mlp_layernorm."
    found = {}
    for kind in ("weight", "bias"):
        for mine, theirs in (
            (f"attention_norm.{kind}", first + kind),
            (f"mlp_norm.{kind}", second + kind),
            (f"attention.qkv.{kind}", f"self_attention.linear_qkv.{kind}"),
            (f"attention.out.{kind}", f"self_attention.linear_proj.{kind}"),
            (f"mlp.fc2.{kind}", f"mlp.linear_fc2.{kind}"),
        ):
            if mine in x:
                found[theirs] = x[mine]
        if f"mlp.fc1.{kind}" in x:
            found[f"mlp.linear_fc1.{kind}"] = x[f"mlp.fc1.{kind}"].reshape(-1, *x[f"mlp.fc1.{kind}"].shape[2:])
            if config.activation != "swiglu":
                found[f"mlp.linear_fc1.{kind}"] = x[f"mlp.fc1.{kind}"]
    if experts:
        found["mlp.router.weight"] = x["mlp.router.weight"]
        for e in range(config.num_experts):
            found[f"mlp.experts.{e}.linear_fc1.weight"] = x["mlp.experts.fc1"][e].flatten(0, 1)
            found[f"mlp.experts.{e}.linear_fc2.weight"] = x["mlp.experts.fc2"][e]
    return found


def ends(ours: Tensors, multiple: int) -> tuple[Tensors, Tensors]:
    """Before the first layer and after the last."""
    first = {"embedding.word_embeddings.weight": padded(ours["embedding.word.weight"], multiple)}
    if "embedding.position" in ours:
        first["embedding.position_embeddings.weight"] = ours["embedding.position"]
    last = {
        f"decoder.final_layernorm.{k}": ours[f"head.norm.{k}"] for k in ("weight", "bias") if f"head.norm.{k}" in ours
    }
    if "head.weight" in ours:
        last["output_layer.weight"] = padded(ours["head.weight"], multiple)
    return first, last


def write_torch_dist(folder: Path, ours: Tensors, config: TransformerConfig, *, stacked: bool, prefix: str) -> None:
    """With Transformer Engine's norms; an entry a tensor of all layers, or one for each layer, expert and half."""
    first, last = ends(ours, 8)
    found: dict[str, Any] = {**first, **last}
    layers = [layer(ours, number, config, fused_norms=True) for number in range(config.num_layers)]
    for name in layers[0]:
        if ".experts." in name:
            continue
        if stacked:
            found[f"decoder.layers.{name}"] = torch.stack([x[name] for x in layers])
        else:
            found |= {f"decoder.layers.{number}.{name}": x[name] for number, x in enumerate(layers)}
    for fc in ("linear_fc1", "linear_fc2") if config.num_experts else ():
        each = [torch.stack([x[f"mlp.experts.{e}.{fc}.weight"] for e in range(config.num_experts)]) for x in layers]
        if stacked:
            found[f"decoder.layers.mlp.experts.experts.{fc}.weight"] = torch.stack(each)
            continue
        for number, experts in enumerate(each):
            for e, expert in enumerate(experts):
                name = f"decoder.layers.{number}.mlp.experts.experts.{e}.{fc}.weight"
                halves = expert.chunk(2)
                found |= {f"{name}_w": halves[0], f"{name}_v": halves[1]} if fc == "linear_fc1" else {name: expert}
    state = {f"{prefix}{name}": tensor.clone() for name, tensor in found.items()}
    state |= {f"optimizer.state.exp_avg.{name}": torch.zeros_like(tensor) for name, tensor in found.items()}
    state["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2"] = "no tensor"
    folder.mkdir(parents=True)
    alone = {"no_dist": True} if "no_dist" in signature(dcp.save).parameters else {}  # newer torch than 2.6
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), **alone)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def cut(name: str, whole: Tensor, rank: int, ways: int, *, gated: bool) -> Tensor:
    """The slice of a tensor-parallel rank."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(ways, 1)[rank]
    if ".linear_fc1." in name and "layer_norm" not in name and gated:
        return torch.cat([half.chunk(ways)[rank] for half in whole.chunk(2)])
    rows = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
    if name.endswith((*rows, "word_embeddings.weight", "output_layer.weight")):
        return whole.chunk(ways)[rank]
    return whole


def write_legacy(
    folder: Path, ours: Tensors, config: TransformerConfig, *, tp: int, pp: int, vpp: int, ep: int, experts: str
) -> None:
    """One file a rank.

    Args:
        experts: how a rank keeps its experts: ``"sequential"``, ``"grouped"``, ``"te"`` or ``"gaudi"``.
    """
    first, last = ends(ours, 4 * tp)
    gated, per_chunk = config.activation == "swiglu", config.num_layers // pp // vpp
    for t in range(tp):
        for p in range(pp):
            for e in range(ep):
                models = []
                for v in range(vpp):
                    begin = (v * pp + p) * per_chunk
                    whole: Tensors = dict(first) if begin == 0 else {}
                    for local in range(per_chunk):
                        mine = layer(ours, begin + local, config, fused_norms=experts == "te")
                        whole |= {f"decoder.layers.{local}.{name}": tensor for name, tensor in mine.items()}
                    if begin + per_chunk == config.num_layers:
                        whole |= last
                        if config.tie_embeddings and pp > 1:
                            whole["output_layer.weight"] = first["embedding.word_embeddings.weight"]
                    sliced = {name: cut(name, x, t, tp, gated=gated).clone() for name, x in whole.items()}
                    models.append(kept(sliced, config.num_experts, e, ep, experts))
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
                (folder / name).mkdir(parents=True)
                content = {"model": models[0]} if vpp == 1 else {f"model{v}": m for v, m in enumerate(models)}
                sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
                args = Namespace(**sizes, expert_tensor_parallel_size=None, num_experts=config.num_experts or None)
                torch.save({**content, "args": args, "optimizer": {"step": 3}}, folder / name / "model_optim_rng.pt")


def kept(sliced: Tensors, count: int, ep_rank: int, ep: int, how: str) -> Tensors:
    """The experts of a rank, as its implementation keeps them."""
    found = {name: x for name, x in sliced.items() if ".mlp.experts." not in name}
    local = count // ep
    for stem in sorted({name.split(".mlp.experts.")[0] for name in sliced if ".mlp.experts." in name}):
        mine = range(ep_rank * local, (ep_rank + 1) * local)
        for fc in ("linear_fc1", "linear_fc2"):
            each = [sliced[f"{stem}.mlp.experts.{e}.{fc}.weight"] for e in mine]
            at = f"{stem}.mlp.experts"
            if how == "sequential":
                found |= {f"{at}.local_experts.{i}.{fc}.weight": x for i, x in enumerate(each)}
            elif how == "te":
                found |= {f"{at}.{fc}.weight{i}": x for i, x in enumerate(each)}
            elif how == "gaudi":
                found |= {f"{at}.local_expert_{e}_{fc}_weight": x for e, x in zip(mine, each, strict=True)}
            elif fc == "linear_fc1":
                hidden = each[0].shape[1]
                found[f"{at}.weight1"] = torch.stack([x.t() for x in each]).reshape(hidden, -1)
            else:
                hidden = each[0].shape[0]
                found[f"{at}.weight2"] = torch.stack([x.t() for x in each]).reshape(-1, hidden)
    return found
