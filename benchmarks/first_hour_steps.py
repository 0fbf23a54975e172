"""The steps of ``first_hour.py``: what each runs, how many cards it needs, and what must be seen."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping

from first_hour_parts import (
    GIB,
    LOSS,
    MILLISECONDS,
    PEAK,
    TINY,
    Command,
    Commands,
    Findings,
    Judge,
    Ran,
    Setup,
    Step,
    fit,
    ours,
)

EXPERTS = " --trainer.strategy.recompute null"
LARGE = " --trainer.strategy.recompute null --trainer.strategy.compile false --trainer.strategy.ops null"
LARGE += " --trainer.callbacks+=DeviceStatsMonitor"
PACKED = " --data.reset_attention_mask true --data.tokenizer_type GPTSentencePieceTokenizer"
PACKED += " --data.tokenizer_model {data}/tokenizer.model"


def _machine(setup: Setup) -> Commands:
    return {
        "cards": Command(("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv")),
        "links": Command(("nvidia-smi", "topo", "-m")),
        "compiler": Command(("sh", "-c", "command -v ${CC:-gcc} || command -v clang")),
    }


def _free_cards(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
    used = [int(mib) for mib in re.findall(r", (\d+) MiB$", ran["cards"].output, re.MULTILINE)]
    findings.expect(len(used) >= setup.cards, f"{len(used)} cards")
    findings.expect(all(mib < 2048 for mib in used), f"MiB in use: {used}")
    findings.expect(setup.cards < 2 or "NV" in ran["links"].output, "cards are linked by NVLink")


def _doctor(setup: Setup) -> Commands:
    words = "doctor --device --limit 120 --report {here}/doctor.json"
    return {"doctor": ours(*words.split(), "--ranks", str(setup.cards))}


CHOSEN = {"attention": "torch's kernel", "rms_norm": "torch's kernel", "rope": "few passes"}


def _ops(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
    chosen = {row["op"]: row["chosen"] for row in json.loads(ran["ops"].output)["ops"]}
    for op, name in CHOSEN.items() if setup.device == "cuda" else ():
        findings.expect(chosen.get(op) == name, f"{op}: {chosen.get(op)}, expected {name}")
    findings.seen.append(f"{len(chosen)} ops")


def _one(setup: Setup) -> Commands:
    return {"cpu": fit(Setup("cpu", 1), 1), "card": fit(setup, 1, more=TINY if setup.device == "cuda" else "")}


def _of_two(setup: Setup) -> Commands:
    loud = {"NCCL_DEBUG": "INFO"}
    return {
        "one": fit(setup, 1),
        "tp": fit(setup, 2, "tp=2", environment=loud),
        "pp": fit(setup, 2, "pp=2", environment=loud),
        "cp": fit(setup, 2, "cp=2", environment=loud),
        "dp": fit(setup, 2, replicas=2, environment=loud),
    }


def _of_all(setup: Setup) -> Commands:
    n, check = setup.used, {"TORCH_NCCL_NAN_CHECK": "1"}
    return {
        "one": fit(setup, 1),
        "tp4": fit(setup, n, "tp=4", replicas=n // 4, environment=check),
        "tp2-pp2": fit(setup, n, "tp=2 pp=2", replicas=n // 4, environment=check),
        "experts-one": fit(setup, 1, more=EXPERTS, recipe="mixtral-tiny"),
        "experts": fit(setup, n, f"ep={n}", EXPERTS, recipe="mixtral-tiny", replicas=n, environment=check),
    }


def _like_one(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
    for name, each in ran.items():
        if name not in ("one", "experts-one"):
            findings.same(name, each, ran["experts-one" if name == "experts" else "one"], 0.002)
            connected = re.findall(r"^.*\): the first .* took .*$", each.output, re.MULTILINE)
            findings.expect(setup.device == "cpu" or bool(connected), f"{name}: connected groups: {connected}")
            init = len(re.findall(r"ncclComm.*Init COMPLETE", each.output))
            findings.seen += [f"{name}: {init} communicators on all ranks"] if init else []


def _struck(number: int) -> Callable[[Setup], Commands]:
    def commands(setup: Setup) -> Commands:
        limit = f"--trainer.strategy.timeout 0:{setup.timeout // 60:02d}:{setup.timeout % 60:02d}"
        n = setup.used
        return {"struck": fit(setup, n, "tp=2", limit, steps=100_000, replicas=n // 2, blow=number)}

    return commands


def _blames(seconds: Callable[[Setup], float]) -> Judge:
    def judge(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
        struck, victim = ran["struck"], setup.victim
        told = re.findall(r"First to blame: rank (\d+)", struck.output)
        findings.expect(told[:1] == [str(victim)], f"the job blamed {told}, rank {victim} was struck")
        findings.expect(struck.culprits[:1] == (victim,), f"`lightning-megatron why` blames {list(struck.culprits)}")
        took = struck.after_blow
        is_soon = took is not None and took <= seconds(setup)
        findings.expect(is_soon, f"seconds from the blow to the end: {took}, at most {seconds(setup)}")

    return judge


DEVICE_STEP = "benchmarks/device_step.py llama3.2-1b --seq 8192 --steps 5 --predict h200"


def _device_step(setup: Setup) -> Commands:
    words = ("{bin}/python", *DEVICE_STEP.split())
    return {"eager": Command(words), "compiled": Command((*words, "--compile"))}


def _speeds(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
    for name, kept in (("eager", 45_119), ("compiled", 51_869)):
        found = [int(speed) for speed in re.findall(r'"tokens_per_s": (\d+)', ran[name].output)]
        findings.expect(found[:1] >= [int(0.85 * kept)], f"{name}: {found} tokens/s; an H200 had {kept}")


def _bar(setup: Setup) -> Commands:
    n = setup.used
    bar = "--trainer.enable_progress_bar true"
    return {"without": fit(setup, n, replicas=n, steps=60), "with": fit(setup, n, more=bar, replicas=n, steps=60)}


def _no_waits(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
    with_bar, without = (ran[name].series(MILLISECONDS)[10:] for name in ("with", "without"))
    findings.ratio("with a progress bar", with_bar, without, 1.1)


def _order(setup: Setup) -> Commands:
    def of(**variables: str) -> Command:
        return fit(setup, 8, "tp=8", LARGE, recipe="llama3.1-8b", steps=8, environment=variables)

    many, low = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"TORCH_NCCL_HIGH_PRIORITY": "0"}
    return {"chosen": of(), "many-queues": of(**many), "low-priority": of(**low)}


def _memory_and_order(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
    chosen = ran["chosen"]
    found = re.findall(r"predicted memory of a rank ([\d.]+) ([MG]iB)", chosen.output) or [("0", "GiB")]
    gib, peak = float(found[0][0]) * GIB[found[0][1]], max(chosen.series(PEAK), default=0.0) / 2**30
    findings.expect(abs(peak - gib) < 0.1 * gib, f"peak {peak:.1f} GiB, predicted {gib:.1f}, within 10 %")
    for name in ("many-queues", "low-priority"):
        other = ran[name].series(MILLISECONDS)[3:]
        findings.ratio(f"chosen settings, against {name}", chosen.series(MILLISECONDS)[3:], other, 1.02)


def _context(setup: Setup) -> Commands:
    n = setup.used
    more = f"{LARGE} --model.dict_kwargs.num_layers 4 --data.seq_length 32768"
    recipe = "llama3.1-8b"
    if setup.device == "cpu":
        more, recipe = "", "llama-tiny"
    return {kind: fit(setup, n, f"cp={n} cp_comm_type={kind}", more, recipe=recipe, steps=6) for kind in ("a2a", "p2p")}


def _ring(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
    findings.same("p2p", ran["p2p"], ran["a2a"], 0.002)
    if setup.device == "cuda":
        findings.ratio(
            "p2p, against a2a", ran["p2p"].series(MILLISECONDS)[2:], ran["a2a"].series(MILLISECONDS)[2:], 2.0
        )


def _packed(setup: Setup) -> Commands:
    length = " --data.seq_length 2048" if setup.device == "cuda" else ""
    return {"packed": fit(setup, 1, more=PACKED + length, steps=100 if setup.device == "cuda" else 24)}


def _steady(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
    taken = ran["packed"].series(MILLISECONDS)
    findings.ratio("the last 10 steps, against steps 5 to 14", taken[-10:], taken[5:15], 1.2)


SAVES = " --trainer.enable_checkpointing true --trainer.strategy.async_save true --trainer.callbacks+=ModelCheckpoint"
SAVES += " --trainer.callbacks.dirpath {here}/saved --trainer.callbacks.every_n_train_steps 4"
SAVES += " --trainer.callbacks.save_last link --model.decay_steps 8"


def _saves(setup: Setup) -> Commands:
    n = setup.used

    def of(steps: int, more: str = "") -> Command:
        return fit(setup, n, "tp=2", SAVES + more, steps=steps, replicas=n // 2)

    goes_on = " --ckpt_path {step}/first/saved/last.ckpt"
    verify = ours("verify", "{step}/first/saved/last.ckpt")
    return {"whole": of(8), "first": of(4), "verify": verify, "again": of(8, goes_on), "twice": of(8, goes_on)}


def _goes_on(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
    whole, *resumed = (ran[name].series(LOSS) for name in ("whole", "again", "twice"))
    for losses in resumed:
        close = len(losses) == 4 and all(abs(a - b) <= 0.002 * abs(b) for a, b in zip(losses, whole[4:], strict=True))
        findings.expect(close, f"resumed losses {losses}, of the whole run {whole[4:]}")
    findings.seen.append(f"two resumed runs are {'' if resumed[0] == resumed[1] else 'not '}equal bit for bit")


def _two_nodes(setup: Setup) -> Commands:
    ranks = setup.nodes * setup.used
    start = "{bin}/torchrun --nnodes %d --nproc-per-node %d --node-rank %d --master-addr %s --master-port 29500"
    start = start % (setup.nodes, setup.used, setup.node_rank, setup.master)
    program = (*start.split(), "-m", "lightning_megatron.tools.cli.main")
    more = f"--trainer.num_nodes {setup.nodes}"
    return {
        "name": Command(("sh", "-c", f"getent hosts $(hostname); ip -4 route get {setup.master} || true")),
        "one": fit(setup, 1),
        "all": fit(setup, setup.used, more=more, replicas=ranks, program=program),
    }


def _across(ran: Mapping[str, Ran], setup: Setup, findings: Findings) -> None:
    findings.seen += re.findall(r"^.*GLOO_SOCKET_IFNAME.*$", ran["all"].output, re.MULTILINE)[:2]
    if setup.node_rank == 0:  # the others log nothing
        findings.same("all nodes", ran["all"], ran["one"], 0.002)


def _cuda_tests(setup: Setup) -> Commands:
    words = "{bin}/python -m pytest -q -p lightning_megatron.testing.one_card --one-card -m"
    return {"tests": Command((*words.split(), "not exhaustive", "tests/cuda"))}


STEPS = (
    Step("machine", 1, 1, "A3", "free cards, NVLink between them, a C compiler", _machine, _free_cards, on_cpu=False),
    Step("doctor", 5, 1, "A1", "exit status 0: nothing is wrong", _doctor),
    Step(
        "ops",
        1,
        1,
        "C14",
        "torch's attention and norm, rotary in few passes",
        lambda setup: {"ops": ours("ops", "--json", "--device", setup.device)},
        _ops,
    ),
    Step(
        "one",
        3,
        1,
        "B1",
        "the first loss on a card as on the CPU, within 2 %",
        _one,
        lambda ran, setup, findings: findings.same("card", ran["card"], ran["cpu"], 0.02),
    ),
    Step(
        "layouts of two",
        4,
        2,
        "A4, C6, C7",
        "first losses as on one card; a line for each group that connects",
        _of_two,
        _like_one,
    ),
    Step(
        "layouts of all",
        5,
        4,
        "A4, A5",
        "the same for tp 4, tp 2 with pp 2, and experts; all exit with 0",
        _of_all,
        _like_one,
    ),
    Step(
        "kill",
        3,
        2,
        "A2",
        "a rank that got SIGKILL is named, all have ended 30 seconds later",
        _struck(signal.SIGKILL),
        _blames(lambda setup: 30.0),
    ),
    Step(
        "stop",
        5,
        2,
        "A2",
        "a rank that got SIGSTOP is named, all have ended 75 seconds after `timeout`",
        _struck(signal.SIGSTOP),
        _blames(lambda setup: setup.timeout + 75.0),
    ),
    Step("tests of CUDA", 10, 1, "B1", "0 failed", _cuda_tests, on_cpu=False),
    Step(
        "device step",
        6,
        1,
        "C14",
        "85 % of an H200's 45,119 and, compiled, 51,869 tokens/s",
        _device_step,
        _speeds,
        on_cpu=False,
    ),
    Step(
        "progress bar", 4, 2, "C4, C13", "at most 1.1 times the step time without a bar", _bar, _no_waits, on_cpu=False
    ),
    Step(
        "order of kernels",
        8,
        8,
        "C5, C6",
        "memory within 10 % of the prediction; variables that the strategy sets are no slower than others",
        _order,
        _memory_and_order,
        on_cpu=False,
    ),
    Step(
        "context parallelism", 5, 2, "C1", "same losses; p2p takes at most twice the step time of a2a", _context, _ring
    ),
    Step("packed documents", 4, 1, "C3", "the last 10 of 100 steps at most 1.2 times steps 5 to 14", _packed, _steady),
    Step(
        "saves", 5, 2, "B2, C12", "resumed losses as those of the whole run; `verify` finds nothing", _saves, _goes_on
    ),
    Step(
        "several nodes",
        5,
        1,
        "A1",
        "the interface of gloo; the first loss as on one card",
        _two_nodes,
        _across,
        nodes=2,
    ),
)
