# docker build -t soloist .
# docker run -v soloist:/var/lib/soloist -v ./jobs.toml:/var/lib/soloist/jobs.toml:ro \
#     -v ./examples:/var/lib/soloist/examples:ro soloist

FROM rust:1-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --profile dist --locked --bin soloist

FROM debian:bookworm-slim
# ca-certificates for rediss://. No init program: soloist reaps what its jobs leave behind.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --user-group --home-dir /var/lib/soloist --create-home soloist \
    && chmod 700 /var/lib/soloist
COPY --from=build /src/target/dist/soloist /usr/bin/soloist

USER 10001:10001
# Jobs start here, and soloist reads jobs.toml here, or else /etc/soloist/jobs.toml. On a single host the volume keeps the
# store: url = "sqlite:/var/lib/soloist/soloist.db", or a path relative to a jobs.toml that is here.
WORKDIR /var/lib/soloist
VOLUME /var/lib/soloist

# Drains: runs may finish for `limits.drain` (60 s). Docker waits 10 s by default, so give --stop-timeout 90.
STOPSIGNAL SIGTERM
# Fails if the instance hangs, also while the store is away: /healthz knows. It needs `[http] listen = "127.0.0.1:7878"`
# (or "0.0.0.0:7878"); where nothing listens on this port, it passes.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/7878 || exit 0; \
    printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3; read -r answer <&3; [[ $answer != *' 503 '* ]]"]
ENTRYPOINT ["/usr/bin/soloist"]
CMD ["run"]
