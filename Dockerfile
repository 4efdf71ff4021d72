# With the torch of PyPI, which has CUDA; the machine needs NVIDIA's driver and container toolkit:
#   docker build --tag infalign .
#   docker run --rm --gpus all --user "$(id -u):$(id -g)" --volume "$PWD:/work" infalign run demo
# Without a GPU, a smaller one:
#   docker build --tag infalign --build-arg TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" .
FROM python:3.11-slim AS build
ENV VIRTUAL_ENV=/venv UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1
RUN pip install --no-cache-dir uv==0.13.9 && uv venv /venv
ARG TORCH=torch==2.13.0
# Several words: what, and from where.
RUN uv pip install --no-deps ${TORCH}
COPY . /src
# Only the locked versions, and of those only files with the locked hashes.
RUN uv pip install --constraint /src/lock.txt --build-constraints /src/lock.txt "/src[all]"

FROM python:3.11-slim
COPY --from=build /venv /venv
RUN useradd --create-home --uid 1000 infalign && chmod 1777 /home/infalign && mkdir --mode 1777 /work
# HOME and USER also for another user, who has no line in /etc/passwd.
ENV PATH=/venv/bin:$PATH HOME=/home/infalign USER=infalign
USER 1000
WORKDIR /work
ENTRYPOINT ["infalign"]
CMD ["--help"]
