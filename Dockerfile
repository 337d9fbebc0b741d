# docker build -t soloist . && docker run -v ./jobs.toml:/etc/soloist/jobs.toml:ro -v soloist:/var/lib/soloist soloist

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
# Jobs start here. On a single host, url = "sqlite:/var/lib/soloist/soloist.db" keeps the store in the volume.
WORKDIR /var/lib/soloist
VOLUME /var/lib/soloist
ENV SOLOIST_CONFIG=/etc/soloist/jobs.toml

# Drains: runs may finish for `limits.drain` (60 s). Docker waits 10 s by default, so give --stop-timeout 90.
STOPSIGNAL SIGTERM
# Fails when jobs.toml or the store cannot be read.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s CMD ["/usr/bin/soloist", "status", "--json"]
ENTRYPOINT ["/usr/bin/soloist"]
CMD ["run"]
