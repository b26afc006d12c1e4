# One image for each platform: docker build --build-arg PLATFORM=cuda --tag interposer:cuda .
# PLATFORM is cpu, cuda, rocm or xpu. docs/install.md shows how to run the images.

FROM debian:12-slim AS wheels
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python3 -m venv /build \
    && /build/bin/pip install --constraint constraints.txt pip \
    && /build/bin/pip install --constraint constraints.txt --group build --group wheels \
    && /build/bin/python platforms/wheels.py /wheels

FROM debian:12-slim
# Triton compiles its launchers with the C compiler and the headers of Python.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home interposer \
    && install --directory --owner interposer /models \
    && python3 -m venv /opt/interposer
ENV PATH=/opt/interposer/bin:$PATH HF_HOME=/models

# TORCH_INDEX is the package index of the torch build for the platform; a mirror may replace it.
ARG PLATFORM=cpu
ARG TORCH_INDEX=
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    case "$PLATFORM" in \
        cpu) build=cpu ;; \
        cuda) build=cu130 ;; \
        rocm) build=rocm7.1 ;; \
        xpu) build=xpu ;; \
        *) echo "PLATFORM is '$PLATFORM'; use cpu, cuda, rocm or xpu" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/$build}" "torch>=2.11,<2.16" \
    && pip install --no-cache-dir --find-links /wheels "interposer-$PLATFORM[cli]" "interposer-engine[constraints]" \
        interposer-gguf interposer-serve
USER interposer
VOLUME /models
EXPOSE 8000
ENTRYPOINT ["interposer"]
CMD ["doctor"]
