# A server in a container, for a CPU or for CUDA; its user is not root, and it keeps everything in /data.
#
#   docker build --tag loopwright .
#   docker build --tag loopwright --build-arg DEVICE=cuda .
#   docker run --rm --network host --volume loopwright:/data loopwright
#   docker run --rm --publish 8000:8000 --gpus all --volume loopwright:/data loopwright \
#       serve Wan-AI/Wan2.1-T2V-1.3B-Diffusers --host 0.0.0.0 --keys /data/keys
#
# By itself it listens on the container's loopback alone, which --publish does not reach; beyond it a server wants keys
# (serve --keys /data/keys --new-key NAME makes one).
FROM python:3.11-slim

# cpu or cuda. Wheels for CUDA bring its libraries; compiling kernels needs a C compiler besides.
ARG DEVICE=cpu
ARG TORCH=torch==2.13.0
RUN case "$DEVICE" in \
        cpu) pip install --no-cache-dir "$TORCH" --index-url https://download.pytorch.org/whl/cpu ;; \
        cuda) apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
            && rm -rf /var/lib/apt/lists/* && pip install --no-cache-dir "$TORCH" ;; \
        *) echo "DEVICE is cpu or cuda, not $DEVICE" >&2; exit 1 ;; \
    esac

WORKDIR /opt/loopwright
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# With --build-arg EXTRAS=serve,safety,fleet also for --replicas.
ARG EXTRAS=serve,safety
RUN pip install --no-cache-dir ".[$EXTRAS]"

RUN useradd --uid 10001 --create-home loopwright && install --directory --owner loopwright /data
USER 10001
WORKDIR /data
VOLUME /data
ENV LOOPWRIGHT_CACHE=/data/cache HF_HOME=/data/huggingface HEALTH=http://127.0.0.1:8000/health
EXPOSE 8000

# With another port or with TLS, set HEALTH. Weights may take long to arrive the first time.
HEALTHCHECK --interval=30s --timeout=70s --start-period=30m \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['HEALTH'], timeout=65)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["loopwright"]
CMD ["serve", "loopwright/tiny-wan"]
