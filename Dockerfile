# The store, and what workers import: docker build --build-arg EXTRAS=metrics,storage,torch -t registry.example/psstore .
# Shards are in main memory: the wheel is built without CUDA. docs/kubernetes.md says what to put on top.

ARG PYTHON=3.12

FROM docker.io/library/python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /psstore
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /psstore

FROM docker.io/library/python:${PYTHON}-slim
ARG EXTRAS=metrics,storage
# By a copy, which is a few MB more: not every builder mounts what a stage has left that it did not have to run again.
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir "$(echo /wheels/psstore-*.whl)[${EXTRAS}]"
# Whom the manifests run containers as, too; with a home, which some libraries look for.
RUN groupadd --gid 65532 psstore \
    && useradd --uid 65532 --gid psstore --create-home --shell /usr/sbin/nologin psstore
USER 65532:65532
WORKDIR /home/psstore
ENV PYTHONUNBUFFERED=1
EXPOSE 5700 9100
CMD ["psstore-server"]
