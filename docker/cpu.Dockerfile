# CPUs: this package with torch's build for them, for preparing data, for tests, and for training small models.
#
#     docker build -f docker/cpu.Dockerfile -t lightning-megatron:cpu .
#     docker/run.sh cpu doctor
FROM python:3.12-slim

# mpirun and sshd are for MPIJobs, pkill for the end of their pods.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server procps \
    && rm -rf /var/lib/apt/lists/* && mkdir -p /run/sshd

ARG TORCH=torch==2.9.0
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "$TORCH"

WORKDIR /opt/lightning-megatron
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY lightning_megatron lightning_megatron
COPY examples examples
COPY docker/keep.py docker/keep.py

# The torch of the step before is a constraint, so that no other build replaces it.
RUN python3 docker/keep.py > constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint constraints.txt '.[data,plot]' \
    && python3 docker/keep.py --check constraints.txt

ENTRYPOINT ["lightning-megatron"]
CMD ["doctor"]
