# A server image. CPU: docker build -t moesaic . — NVIDIA: docker build --build-arg EXTRAS=flashinfer \
#   --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 -t moesaic:cuda .
# FlashInfer and Triton compile on first use and need the compiler of a devel image; see docs/deploying.md.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE} AS build
ARG EXTRAS=""
# Where torch comes from: the CPU build by default; with CUDA, PyPI's own.
ARG TORCH_INDEX=""
RUN if ! command -v python3 >/dev/null || ! python3 -c 'import ensurepip' 2>/dev/null; then \
      apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc \
      && rm -rf /var/lib/apt/lists/*; fi
RUN python3 -m venv /opt/moesaic
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN if [ -n "${TORCH_INDEX}" ]; then /opt/moesaic/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch; fi \
    && /opt/moesaic/bin/pip install --no-cache-dir ".${EXTRAS:+[${EXTRAS}]}"

FROM ${BASE}
RUN if ! command -v python3 >/dev/null; then \
      apt-get update && apt-get install -y --no-install-recommends python3 python3-dev gcc \
      && rm -rf /var/lib/apt/lists/*; fi \
    && useradd --create-home --uid 10001 moesaic
COPY --from=build /opt/moesaic /opt/moesaic
ENV PATH=/opt/moesaic/bin:$PATH MOESAIC_HOST=0.0.0.0 MOESAIC_LOG_FORMAT=json PYTHONUNBUFFERED=1
USER moesaic
WORKDIR /home/moesaic
# Models from the hub, compiled kernels, tuned tables.
VOLUME /home/moesaic/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["moesaic", "serve"]
