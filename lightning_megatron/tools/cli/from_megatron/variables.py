"""Variables of the scripts with which Megatron-LM's fork for Gaudi (release 1.24) is configured, as tables.

A variable that is not set has its script's default. ``docs/from-megatron.md`` is made from them.
"""

from __future__ import annotations

from collections.abc import Mapping

FLAGS: Mapping[str, tuple[str, ...]] = {
    "HL_TP": ("--tensor-model-parallel-size",),
    "HL_PP": ("--pipeline-model-parallel-size",),
    "HL_CP": ("--context-parallel-size",),
    "HL_CP_COMM_TYPE": ("--cp-comm-type",),
    "HL_MICRO_BATCH": ("--micro-batch-size",),
    "HL_GBS": ("--global-batch-size",),
    "HL_SEQ_LEN": ("--seq-length", "--max-position-embeddings"),
    "HL_NUM_LAYERS": ("--num-layers",),
    "HL_HIDDEN_SIZE": ("--hidden-size",),
    "HL_FFN_HIDDEN_SIZE": ("--ffn-hidden-size",),
    "HL_NUM_HEADS": ("--num-attention-heads",),
    "HL_NUM_QUERY_GROUPS": ("--num-query-groups",),
    "HL_DROPOUT": ("--attention-dropout", "--hidden-dropout"),
    "HL_TRAIN_ITERS": ("--train-iters",),
    "HL_LR_WARMUP_ITERS": ("--lr-warmup-iters",),
    "HL_EVAL_ITERS": ("--eval-iters",),
    "HL_EVAL_INTERVAL": ("--eval-interval",),
    "HL_LOG_INTERVAL": ("--log-interval",),
    "HL_OPTIMIZER": ("--optimizer",),
    "HL_NUM_WORKERS": ("--num-workers",),
    "HL_DATA_CACHE_DIR": ("--data-cache-path",),
    "HL_CACHE_PATH": ("--data-cache-path",),
    "HL_TOKENIZER_TYPE": ("--tokenizer-type",),
    "HL_TENSORBOARD_DIR": ("--tensorboard-dir",),
    "HL_KILL_SWITCH_FILE": ("--kill-switch-file",),
    "HL_KILL_SWITCH": ("--kill-switch-file",),
    "HL_USE_FUSED_SDPA": ("--use-fused-sdpa",),
    "HL_USE_FAST_SOFTMAX": ("--use-fast-softmax",),
    "HL_USE_TORCH_COMPILE": ("--use-torch-compile",),
    "HL_MOE_NUM_EXPERTS": ("--num-experts",),
    "HL_MOE_TOPK": ("--moe-router-topk",),
    "HL_MOE_AUX_LOSS_COEFF": ("--moe-aux-loss-coeff",),
    "HL_MOE_ZLOSS_COEFF": ("--moe-z-loss-coeff",),
    "HL_MOE_LOAD_BALANCING_TYPE": ("--moe-router-load-balancing-type",),
    "HL_TOKEN_DISPATCHER_TYPE": ("--moe-token-dispatcher-type",),
    "HL_MOE_EXPERT_CAPACITY_FACTOR": ("--moe-expert-capacity-factor",),
    "HL_MOE_TOKEN_DROP_POLICY": ("--moe-token-drop-policy",),
}
"""Variables whose value is that of a flag."""

SWITCHES: Mapping[str, str] = {
    "HL_BF16": "--bf16",
    "HL_SEQ_PARALLEL": "--sequence-parallel",
    "HL_OVERLAP_GRAD_REDUCE": "--overlap-grad-reduce",
    "HL_USE_DISTRIBUTED_OPTIMIZER": "--use-distributed-optimizer",
    "HL_DIST_OPTIMIZER": "--use-distributed-optimizer",
    "HL_DETERMINISTIC_MODE": "--deterministic-mode",
    "HL_MOE_DYNAMIC": "--moe-dynamic-hpu",
    "HL_MOE_ROUTER_PRE_SOFTMAX": "--moe-router-pre-softmax",
    "HL_MOE_PAD_EXPERT_INPUT_TO_CAPACITY": "--moe-pad-expert-input-to-capacity",
    "HL_MOE_TOKEN_DISTRIBUTION_LOGGING": "--moe-token-distribution-logging",
}
"""Variables that set a flag if they are 1, and none if they are 0."""

WITH_BINS: Mapping[str, str] = {
    "HL_MOE_CAPACITY_BINS_EXP_BASE": "--moe-capacity-bins-exp-base",
    "HL_MOE_CAPACITY_BINS_ALIGNMENT": "--moe-capacity-bins-alignment",
    "HL_MOE_CAPACITY_BINS_OPTIMIZE_INTERVAL": "--moe-capacity-bins-optimize-interval",
    "HL_MOE_CAPACITY_BINS_MAX_OVERHEAD_FACTOR": "--moe-capacity-bins-max-overhead-factor",
}
WITH_FP8: Mapping[str, str] = {
    "HL_FP8_FORMAT": "--fp8-format",
    "HL_FP8_MARGIN": "--fp8-margin",
    "HL_FP8_AMAX_COMPUTE_ALGO": "--fp8-amax-compute-algo",
    "HL_FP8_AMAX_HISTORY_LEN": "--fp8-amax-history-len",
    "HL_CACHE_FP8_WEIGHT": "--cache-fp8-weight",
}
"""Variables that matter only if capacity bins, or fp8, are on."""

COMPUTED: Mapping[str, str] = {
    "HL_NUM_NODES": "machines",
    "HL_DEVICES_PER_NODE": "devices of a machine",
    "HL_DP": "checked against the number of devices",
    "HL_LLAMA_VER": "sizes and rates of the model",
    "HL_LLAMA_MODEL_SIZE": "sizes and rates of the model",
    "HL_MIXTRAL_MODEL": "sizes and rates of the model",
    "HL_DATA_DIR_ROOT": "`data.data_path`, tokenizer",
    "HL_DATA_FILE_PREFIX": "`data.data_path`",
    "HL_TOKENIZER_MODEL": "`data.tokenizer_model`",
    "HL_RESULTS_DIR": "folders of checkpoints and logs",
    "HL_RESULTS_DIR_PREFIX": "folders of checkpoints and logs",
    "HL_CHECKPOINTS_DIR": "`ModelCheckpoint.dirpath`",
    "HL_LOAD_DIR": "`ckpt_path`",
    "HL_SAVE": "`ModelCheckpoint`",
    "HL_SAVE_INTERVAL": "`ModelCheckpoint.every_n_train_steps`",
    "HL_CKP_ACT": "`recompute`",
    "HL_RECOMPUTE_NUM_LAYERS": "`recompute_num_layers`",
    "HL_PROFILE_TYPE": "`DeviceProfiler`",
    "HL_PROFILE_STEP_START": "`DeviceProfiler.steps`",
    "HL_PROFILE_STEP_END": "`DeviceProfiler.steps`",
    "HL_FP8": "`ops`, `fp8`",
    "HL_MOE_EP": "`ep`",
    "HL_ETP": "`etp`",
    "HL_MOE_NUM_CAPACITY_BINS": "`moe_capacity_bins`",
    "HL_MOE_TOKEN_DISTRIBUTION_LOGGING_INTERVAL": "`ExpertTelemetry.every_n_steps`",
}
"""Variables from which flags are computed, and what becomes of them."""

_LAUNCHER, _FORMAT = "Lightning's launcher, or torchrun, starts the processes", "one format of checkpoints"
HERE: Mapping[str, str] = {
    **dict.fromkeys(("HL_LAUNCHER_TYPE", "HL_HOSTSFILE", "HL_SSH_PORT", "HL_PE", "HL_PPR"), _LAUNCHER),
    **dict.fromkeys(("HL_TORCHRUN_MULTINODE", "HL_TORCHRUN_NODE_RANK", "HL_TORCHRUN_MASTER_ADDR"), _LAUNCHER),
    **dict.fromkeys(("HL_CKPT_FORMAT", "HL_CKPT_FULLY_PARALLEL_LOAD", "HL_NO_LOAD_STRICT"), _FORMAT),
    **dict.fromkeys(("HL_SAVE_DISTRIB_OPTIMIZER_METHOD", "HL_LOAD_DISTRIB_OPTIMIZER_METHOD"), _FORMAT),
    **dict.fromkeys(
        ("HL_VERIFY_CKPT", "HL_USE_CKPT_OPT_PARAM_SCHEDULER"), "checkpoints are verified, schedules resumed"
    ),
    **dict.fromkeys(("HL_MOE_PERMUTED_WEIGHTS", "HL_MOE_FUSED_WEIGHTS"), "the fastest kernel of the device is taken"),
    **dict.fromkeys(("HL_MOE_GROUPED_GEMM", "HL_FP8_FORCE_SEQ_MOE"), "the fastest kernel of the device is taken"),
    **dict.fromkeys(("HL_USE_FUSED_RMSNORM", "HL_USE_FLASH_ATTN"), "the fastest kernel of the device is taken"),
    **dict.fromkeys(("HL_TRANSFORMER_IMPL", "HL_USE_TE_CUSTOM_OP"), "there is one kind of model"),
    "HL_USE_FUSED_SDPA_WITH_RECOMPUTE": "attention under recomputation uses the same kernel",
    "HL_USE_REGIONAL_COMPILATION": "compilation is block by block",
    "HL_USE_CPU_INIT": "values are the same in every layout",
    "HL_MOE_ROUTER_FP32": "routers compute in fp32",
    "HL_FP8_AMAX_REDUCE": "scales are equal on all ranks that share a tensor",
    "HL_REDIRECT_LOGS": "the shell's",
}
"""Variables for behaviour that is always on here, or that belongs to another program."""

_ONE_SETTING = "a setting of Gaudi's software: set it in the environment"
NONE: Mapping[str, str] = {
    "HL_USE_LAZY_MODE": f"{_ONE_SETTING}, `PT_HPU_LAZY_MODE`",
    "HL_TORCH_COMPILE_DISABLE": f"{_ONE_SETTING}, `TORCH_COMPILE_DISABLE`",
    "HL_ENV_FLAGS": _ONE_SETTING,
    "HL_HNIC": f"{_ONE_SETTING}, `HCCL_OVER_OFI`, `HCCL_GAUDI_DIRECT`, `FI_PROVIDER`",
    "HL_CACHE_SIZE_LIMIT": "torch._dynamo.config.recompile_limit",
    "HL_ALLOW_UNSPEC_INT_ON_NN_MODULE": "torch._dynamo.config.allow_unspec_int_on_nn_module",
    "HL_USE_TORCH_COMPILED_AUTOGRAD": "backward is compiled with forward",
    "HL_TE_LIMIT_GRAPH_SIZE": "a setting of Intel's transformer engine, which is not used",
    "HL_TE_DISABLE_TCOMPILE_ON_FUSED_ATTN": "a setting of Intel's transformer engine, which is not used",
    "HL_FP8_ENFORCE_BF16_AMAX_REDUCTION": "a setting of Intel's transformer engine, which is not used",
    "HL_FP8_COVERAGE": "linear layers of blocks multiply in fp8; `fp8.first_layers` and `last_layers` leave some out",
    "HL_USE_FUSED_SDPA_FP8": "attention does not multiply in fp8",
    "HL_FP8_SMOOTH_SWIGLU": "not there",
    "HL_FP8_MEASURE_INTERVAL": "scales follow every step",
    "HL_CACHE_FP8_WEIGHT_FWD": "fp8 weights are made once a step",
    "HL_MICRO_BATCH_SYNC_INTERVAL": "no counterpart",
    "HL_MOE_CAPACITY_BINS_OPTIMIZE_MAX_GROUP": "each layer cuts its bins by itself",
    "HL_EXIT_INTERVAL": "`trainer.max_steps`",
    "HL_SKIP_TRAIN": "`lightning-megatron validate` or `test`",
    "HL_LM_EVAL": "not a training",
    "HL_NO_LOAD_OPTIM": "load weights alone: `load_from_checkpoint(DIR)` or `--model.from_hf`",
    "HL_NO_LOAD_RNG": "seed the run otherwise",
    "HL_OVERRIDE_OPT_PARAM_SCHEDULER": "a schedule is resumed as it was saved",
    "HL_CKPT_CONVERT_FORMAT": "`lightning-megatron convert`",
    "HL_CKPT_CONVERT_SAVE": "`lightning-megatron convert`",
    "HL_PROFILE_RANKS": "every rank is traced",
}
"""Variables without a counterpart, with the reason or an alternative; 0 counts as not set."""
