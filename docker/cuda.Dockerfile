# NVIDIA's devices: this package on an image that has torch for them.
#
#     docker build -f docker/cuda.Dockerfile -t lightning-megatron:cuda .
#     docker/run.sh cuda doctor
#
# CUDA_IMAGE is any image with a torch of at least 2.6 for CUDA, such as NVIDIA's own.
ARG CUDA_IMAGE=pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime
FROM ${CUDA_IMAGE}

# mpirun and sshd are for MPIJobs, pkill for the end of their pods.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server procps \
    && rm -rf /var/lib/apt/lists/* && mkdir -p /run/sshd

WORKDIR /opt/lightning-megatron
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY lightning_megatron lightning_megatron
COPY examples examples
COPY docker/keep.py docker/keep.py

# The image's torch is a constraint: pip fails instead of replacing it.
RUN python3 docker/keep.py > constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint constraints.txt '.[data,plot]' \
    && python3 docker/keep.py --check constraints.txt

ENTRYPOINT ["lightning-megatron"]
CMD ["doctor"]
