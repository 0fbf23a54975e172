"""Write ``megatron.zip``: ``python make.py`` in an environment with torch and megatron-core 0.16.1."""

import argparse
import os
import shutil
import sys
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

# Megatron asks for a GPU in places that a tiny model on a CPU only passes through.
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None
torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state
torch.cuda.Stream = lambda *_, **__: None
torch.Tensor.cuda = lambda self, *_, **__: self

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

moe_utils.te_general_gemm = None  # without Transformer Engine this release forgets to say so

HERE = Path(__file__).parent
PADDED, LENGTH, ITERATION = 24, 8, 10
COMMON = {"hidden_size": 8, "num_attention_heads": 4, "ffn_hidden_size": 12, "init_method_std": 0.4}
LLAMA = {"add_bias_linear": False, "gated_linear_unit": True, "normalization": "RMSNorm", "num_query_groups": 2}
CASES = {
    "gpt": {"layers": 2, "tp": 2, "pp": 2, "vpp": 1, "ep": 1},
    "llama": {"layers": 4, "tp": 1, "pp": 2, "vpp": 2, "ep": 1},
    "mixtral": {"layers": 2, "tp": 1, "pp": 2, "vpp": 1, "ep": 2},
}


def arguments(kind: str, sizes: dict) -> argparse.Namespace:
    """Values that Megatron's training script would have stored of its command line."""
    llama = kind != "gpt"
    return argparse.Namespace(
        num_layers=sizes["layers"],
        **{name: COMMON[name] for name in ("hidden_size", "num_attention_heads", "ffn_hidden_size", "init_method_std")},
        kv_channels=2,
        group_query_attention=llama,
        num_query_groups=2 if llama else 1,
        max_position_embeddings=LENGTH,
        seq_length=LENGTH,
        position_embedding_type="rope" if llama else "learned_absolute",
        rotary_base=10000,
        rotary_percent=1.0,
        use_rope_scaling=False,
        normalization="RMSNorm" if llama else "LayerNorm",
        norm_epsilon=1e-5,
        swiglu=llama,
        bias_gelu_fusion=False,
        add_bias_linear=not llama,
        add_qkv_bias=False,
        untie_embeddings_and_output_weights=llama,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        vocab_size=21,
        padded_vocab_size=PADDED,
        make_vocab_size_divisible_by=4,
        num_experts=4 if kind == "mixtral" else None,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.02,
        moe_layer_freq=1,
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=sizes["tp"],
        virtual_pipeline_model_parallel_size=sizes["vpp"] if sizes["vpp"] > 1 else None,
        attention_backend=AttnBackend.auto,
        params_dtype=torch.float32,
    )


def build(kind: str, sizes: dict) -> list[GPTModel]:
    """The chunks of this rank."""
    llama = kind != "gpt"
    options = LLAMA | {"activation_func": F.silu} if llama else {}
    if kind == "mixtral":
        options |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}
    config = TransformerConfig(
        num_layers=sizes["layers"],
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        virtual_pipeline_model_parallel_size=sizes["vpp"] if sizes["vpp"] > 1 else None,
        expert_model_parallel_size=sizes["ep"],
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **COMMON | options,
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    chunks = []
    for number in range(sizes["vpp"]):
        stage = {"vp_stage": number} if sizes["vpp"] > 1 else {}
        chunks.append(
            GPTModel(
                config,
                spec,
                vocab_size=PADDED,
                max_sequence_length=LENGTH,
                pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, **stage),
                post_process=ps.is_pipeline_last_stage(ignore_virtual=False, **stage),
                share_embeddings_and_output_weights=not llama,
                position_embedding_type="rope" if llama else "learned_absolute",
                **stage,
            )
        )
    return chunks


def shake(chunks: list[GPTModel]) -> None:
    """Norms and biases get values that tell them apart; copies over ranks stay equal."""
    for number, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            if param.ndim == 1:
                place = ps.get_tensor_model_parallel_rank() if getattr(param, "tensor_model_parallel", False) else 0
                seed = f"{name}/{number}/{ps.get_pipeline_model_parallel_rank()}/{place}"
                torch.manual_seed(sum(i * ord(letter) for i, letter in enumerate(seed)))
                with torch.no_grad():
                    param.add_(0.3 * torch.randn_like(param))


def sharded(chunks: list[GPTModel]) -> dict:
    metadata = {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    return {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}


def start(rank: int, world: int, sizes: dict, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    ps.initialize_model_parallel(
        sizes["tp"],
        sizes["pp"],
        sizes["vpp"] if sizes["vpp"] > 1 else None,
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=sizes["tp"],
    )
    model_parallel_cuda_manual_seed(3)


def save(rank: int, world: int, kind: str, folder: Path, port: int) -> None:
    sizes = CASES[kind]
    start(rank, world, sizes, port)
    torch.manual_seed(5)
    chunks = build(kind, sizes)
    shake(chunks)
    common = {"args": arguments(kind, sizes), "checkpoint_version": 3.0, "iteration": ITERATION}
    modern = folder / kind / "torch_dist" / f"iter_{ITERATION:07d}"
    modern.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({**common, **sharded(chunks)}, str(modern))
    # The name that Megatron's training script gives: the pipeline's number where there is one, then the experts'.
    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    name += f"_{ps.get_pipeline_model_parallel_rank():03d}" if sizes["pp"] > 1 else ""
    name += f"_{ps.get_expert_model_parallel_rank():03d}" if sizes["ep"] > 1 else ""
    if ps.get_expert_data_parallel_rank() == 0:
        legacy = folder / kind / "torch" / f"iter_{ITERATION:07d}" / name
        legacy.mkdir(parents=True, exist_ok=True)
        names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        models = {n: chunk.state_dict_for_save_checkpoint() for n, chunk in zip(names, chunks, strict=True)}
        torch.save({**common, **models}, legacy / "model_optim_rng.pt")
    for form in ("torch_dist", "torch"):
        (folder / kind / form / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    dist.destroy_process_group()


def logits(rank: int, kind: str, folder: Path, port: int) -> None:
    """Megatron reads its own checkpoint in one process, and says what it computes."""
    sizes = {**CASES[kind], "tp": 1, "pp": 1, "vpp": 1, "ep": 1}
    start(rank, 1, sizes, port)
    (model,) = build(kind, sizes)
    loaded = dist_checkpointing.load(sharded([model]), str(folder / kind / "torch_dist" / f"iter_{ITERATION:07d}"))
    model.load_state_dict(loaded["model"])
    tokens = torch.arange(LENGTH)[None] * 5 % 21
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    found = model(tokens, torch.arange(LENGTH)[None], mask).detach()
    torch.save({"tokens": tokens, "logits": found}, folder / kind / "logits.pt")


def main() -> None:
    folder = HERE / "megatron"
    for number, (kind, sizes) in enumerate(CASES.items()):
        world = sizes["tp"] * sizes["pp"] * sizes["ep"]
        torch.multiprocessing.spawn(save, (world, kind, folder, 29600 + number), nprocs=world)
        torch.multiprocessing.spawn(logits, (kind, folder, 29610 + number), nprocs=1)
    with zipfile.ZipFile(HERE / "megatron.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder))
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
