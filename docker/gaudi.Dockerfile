# Gaudi: this package on Intel's own image, whose torch and bridge are built for each other and stay as they are.
#
#     docker build -f docker/gaudi.Dockerfile --build-arg GAUDI_IMAGE=... -t lightning-megatron .
#     docker run --runtime=habana -e HABANA_VISIBLE_DEVICES=all --cap-add=sys_nice --net=host --ipc=host \
#         --shm-size=10g --ulimit nofile=1048576:1048576 lightning-megatron doctor
#
# GAUDI_IMAGE is Intel's "pytorch-installer" image of the release that fits your driver: docs.habana.ai, "Support
# Matrix". Written after Intel's documentation; never built on a machine with a Gaudi by us.
ARG GAUDI_IMAGE
FROM ${GAUDI_IMAGE}

WORKDIR /opt/lightning-megatron
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY lightning_megatron lightning_megatron
COPY examples examples
COPY docker/keep.py docker/keep.py

# What Intel has installed becomes a constraint: pip fails instead of replacing torch by one without the bridge. The
# recipes draw how experts are loaded (plot), and read tokenizer.json and .zst (data).
RUN python3 docker/keep.py > constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint constraints.txt '.[data,plot]' \
    && python3 docker/keep.py --check constraints.txt

ENTRYPOINT ["lightning-megatron"]
CMD ["doctor"]
