# One image for every role; the command says which: api, worker, reconciler, simulator, migrate.
FROM python:3.11-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv --without-pip /opt/fencepost
COPY requirements.txt /build/requirements.txt
RUN pip --python /opt/fencepost/bin/python install --require-hashes --only-binary :all: \
        --requirement /build/requirements.txt

FROM python:3.11-slim
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin fencepost \
    && install --directory --owner=fencepost --group=fencepost /var/lib/fencepost
COPY --from=build /opt/fencepost /opt/fencepost
ENV PATH=/opt/fencepost/bin:$PATH \
    PYTHONPATH=/srv/fencepost \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /srv/fencepost
COPY alembic.ini ./
COPY alembic/ alembic/
COPY app/ app/
COPY workers/ workers/
RUN python -m compileall -q . \
    && printf '#!/bin/sh\nexec python -m app.cli "$@"\n' > /opt/fencepost/bin/fencepost \
    && chmod 755 /opt/fencepost/bin/fencepost
USER 10001:10001
EXPOSE 8000
# Of the API; the other roles name their own (docker-compose.yml).
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]
ENTRYPOINT ["fencepost"]
CMD ["api", "--host", "0.0.0.0", "--port", "8000"]
