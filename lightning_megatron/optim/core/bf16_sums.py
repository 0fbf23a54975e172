"""Intel's rule for gradients that are summed in bf16."""

_MOST_SUMMANDS = 256


def allows_bf16_sums(micro_batches_per_step: int, data_parallel_size: int) -> bool:
    """True if gradients may be summed over micro-batches and ranks in bf16.

    Gaudi's Megatron-LM fork (release 1.20) allows bf16 for a gradient that is a sum over at most 256 micro-batches;
    beyond that a summand is so small beside the sum that bf16's 8 bits lose it.

    Args:
        micro_batches_per_step: forwards of one optimizer step on one replica (micro-batches of all accumulated
            batches).
        data_parallel_size: number of replicas.
    """
    return micro_batches_per_step * data_parallel_size <= _MOST_SUMMANDS
