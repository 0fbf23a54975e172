#!/usr/bin/env bash
# Runs lightning-megatron in a container of docker/: docker/run.sh [--dry-run] gaudi|cuda|cpu COMMAND ...
#
# Three folders of this machine are in the container: the current one as /workspace, where the command runs, DATA as
# /data and CHECKPOINTS as /checkpoints. IMAGE names another image than lightning-megatron:KIND, SHM_SIZE another size of
# /dev/shm than 10g, through which DataLoader workers pass batches.
set -euo pipefail

usage='usage: docker/run.sh [--dry-run] gaudi|cuda|cpu COMMAND ...'
start=()
if [[ ${1:-} == --dry-run ]]; then
    start=(echo)
    shift
fi
kind=${1:?$usage}
shift
: "${1:?$usage}"
: "${DATA:?the folder with token files}" "${CHECKPOINTS:?the folder for checkpoints}"

case $kind in
    gaudi)
        devices=(--runtime=habana -e HABANA_VISIBLE_DEVICES="${HABANA_VISIBLE_DEVICES:-all}"
            -e OMPI_MCA_btl_vader_single_copy_mechanism=none --cap-add=sys_nice --ipc=host)
        ;;
    cuda) devices=(--gpus "${GPUS:-all}") ;;
    cpu) devices=() ;;
    *)
        echo "error: $kind: no such kind of device. $usage" >&2
        exit 2
        ;;
esac

# With the host's memory for IPC its /dev/shm counts, and a size of the container's own would be refused.
if [[ $kind != gaudi ]]; then
    devices+=(--shm-size="${SHM_SIZE:-10g}")
fi
"${start[@]}" docker run --rm --init --stop-timeout "${GRACE:-300}" --network=host --ulimit nofile=1048576:1048576 \
    --ulimit memlock=-1 "${devices[@]}" \
    -v "$PWD:/workspace" -v "$DATA:/data" -v "$CHECKPOINTS:/checkpoints" -w /workspace \
    "${IMAGE:-lightning-megatron:$kind}" "$@"
