#!/bin/bash
# systemd.sh [TREE]: run the sample jobs under the units of ../systemd in a systemd that has booted, and judge what they do.
#
# Needs root and, of Debian, debootstrap and systemd-container. TREE is a directory for the small Debian that is booted; it is
# made (some 300 MB) where it does not exist, and kept. Without TREE it is made in a temporary directory and removed.
# The machine is a container of systemd-nspawn: its systemd, users, sandboxes, seccomp filters and cgroups are real.
#
# Not part of test.sh: it downloads a distribution.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "systemd.sh: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "must be root"
for program in debootstrap systemd-nspawn nsenter; do
    command -v "$program" >/dev/null || fail "no $program: apt-get install debootstrap systemd-container util-linux"
done
cargo build --locked

nspawn='' ours=''
tree=${1-}
if [ -z "$tree" ]; then
    tree=$(mktemp -d)/tree
    ours=yes
fi
end() {
    if [ -n "$nspawn" ]; then
        kill -TERM "$nspawn" 2>/dev/null || true
        wait "$nspawn" 2>/dev/null || true
    fi
    [ -z "$ours" ] || rm -rf "$(dirname "$tree")"
}
trap end EXIT

[ -e "$tree/etc/debian_version" ] ||
    debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,procps,sqlite3,tzdata bookworm "$tree"

# What README and unit say: program, jobs, user, unit. The sample's files go to the directory that jobs start in.
install -D target/debug/soloist "$tree/usr/bin/soloist"
install -D -m 644 systemd/soloist.service "$tree/etc/systemd/system/soloist.service"
install -D -m 644 systemd/soloist.sysusers.conf "$tree/etc/soloist.sysusers.conf"
rm -rf "$tree/var/lib/soloist" "$tree/etc/systemd/system/soloist.service.d"
install -d -m 755 "$tree/etc/soloist"
sed 's|^url = .*|url = "sqlite:/var/lib/soloist/soloist.db"|' jobs.toml >"$tree/etc/soloist/jobs.toml"
cat >>"$tree/etc/soloist/jobs.toml" <<'END'

# What a job may not do. Each line of its output is one attempt that came through.
[jobs.outbreak]
schedule = "@yearly"
command = '''
touch /usr/x 2>/dev/null && echo "wrote to /usr"
touch /etc/x 2>/dev/null && echo "wrote to /etc"
touch /var/tmp/shared 2>/dev/null; test -e /var/tmp/outside && echo "saw the /var/tmp of others"
ls /root >/dev/null 2>&1 && echo "read /root"
ls /home/* >/dev/null 2>&1 && echo "read /home"
test -e /dev/kmsg && echo "saw /dev/kmsg"
chmod u+s /bin/sh 2>/dev/null && echo "changed /bin/sh"
cp /bin/true ./suid && chmod u+s ./suid 2>/dev/null && echo "made a setuid program"
su -s /bin/true nobody 2>/dev/null && echo "became another user"
unshare -r true 2>/dev/null && echo "made a user namespace"
chown nobody ./suid 2>/dev/null && echo "gave a file away"
grep -q '^CapBnd:.0000000000000000$' /proc/self/status || echo "has capabilities in its bounding set"
grep -q '^NoNewPrivs:.1$' /proc/self/status || echo "may get new privileges"
echo x 2>/dev/null >/proc/sys/kernel/hostname && echo "wrote to /proc/sys"
true
'''

[jobs.long]
schedule = "@yearly"
command = "sleep 1000 & sleep 1000"
END
touch "$tree/var/tmp/outside"
install -d "$tree/home/somebody"

systemd-nspawn --quiet --directory="$tree" --register=no --keep-unit --boot --link-journal=no >"$tree.log" 2>&1 </dev/null &
nspawn=$!
leader=''
for _ in $(seq 100); do
    leader=$(pgrep -P "$nspawn" -x systemd) && break
    kill -0 "$nspawn" 2>/dev/null || fail "systemd-nspawn ended: $(tail -3 "$tree.log")"
    sleep 0.2
done
inside() { nsenter --target "$leader" --all -- env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "$@"; }
for _ in $(seq 100); do
    state=$(inside systemctl is-system-running 2>/dev/null) || true
    case $state in running | degraded) break ;; esac
    sleep 0.3
done
case $state in running | degraded) ;; *) fail "systemd did not come up: $state" ;; esac
inside systemd-sysusers /etc/soloist.sysusers.conf

soloist() { inside runuser -u soloist -- env -C /var/lib/soloist soloist --config /etc/soloist/jobs.toml "$@"; }
main_pid() { inside systemctl show --property=MainPID --value soloist; }
ok() { echo "ok: $*"; }
until_true() { # until_true WHAT COMMAND...: for two minutes
    local what=$1 i
    shift
    for i in $(seq 240); do
        if "$@"; then ok "$what"; return; fi
        sleep 0.5
    done
    inside journalctl --no-pager -u soloist | tail -30
    fail "not: $what"
}
has() { soloist history "$1" --json 2>/dev/null | grep "\"$2\"" >/dev/null; } # not grep -q: the writer would die of SIGPIPE
is_active() { [ "$(inside systemctl is-active soloist)" = active ]; }

# judge NAME EXPOSURE: the unit as it is installed now
judge() {
    echo "== $1"
    rm -rf "$tree"/var/lib/soloist/*
    inside systemctl daemon-reload
    local verified
    verified=$(inside systemd-analyze verify soloist.service 2>&1) || true
    [ -z "$verified" ] || fail "systemd-analyze verify: $verified"
    inside systemctl restart soloist || { inside journalctl --no-pager -u soloist | tail -20; fail "it does not start"; }
    install -d "$tree/var/lib/soloist/examples"
    cp -r examples/lottery "$tree/var/lib/soloist/examples/"
    echo "exposure: $(inside systemd-analyze security --no-pager soloist.service | tail -1)"
    inside systemd-analyze security --no-pager --threshold="$2" soloist.service >/dev/null || fail "exposure above $2 tenths"

    until_true "the lottery draws" has lottery-demo succeeded
    until_true "hello runs" has hello succeeded
    until_true "a failed command is tried again, and works" has flaky succeeded
    until_true "a command that hangs is ended by its timeout" has hangs timed_out
    [ "$(inside sqlite3 /var/lib/soloist/lottery.db 'select count(*) > 0 from winners')" = 1 ] || fail "no winner is in lottery.db"
    ok "winners are recorded"

    inside systemctl reload soloist
    until_true "it is reloaded" eval 'inside journalctl --no-pager -u soloist | grep reloaded >/dev/null'
    if inside journalctl --no-pager -u soloist | grep "TIME ZONE"; then fail "the table of check is in the journal"; fi
    until_true "the journal's messages name job, outcome and reason" eval 'inside journalctl --no-pager -u soloist | grep "ended .flaky.: failed (exit 1) after" >/dev/null'

    soloist trigger long
    until_true "a long run begins" eval '[ "$(inside pgrep -c -f "^sleep 1000")" = 2 ]'
    inside find /sys/fs/cgroup -type d -path '*/soloist.service/soloist-*' | grep . >/dev/null || fail "the run has no cgroup below the unit's"
    ok "it has a cgroup below the unit's"
    local before
    before=$(main_pid)
    inside kill -KILL "$before"
    until_true "its guard ends it when the daemon is killed" eval '! inside pgrep -f "^sleep 1000" >/dev/null'
    until_true "systemd starts the daemon again" eval 'is_active && [ "$(main_pid)" != "$before" ]'

    before=$(main_pid)
    inside kill -STOP "$before"
    until_true "a hung daemon is started again by the watchdog" eval 'is_active && [ "$(main_pid)" != "$before" ]'

    soloist trigger outbreak --wait || fail "outbreak failed"
    soloist logs outbreak | tee "$tree.outbreak"

    inside systemctl stop soloist
    [ "$(inside systemctl show --property=Result --value soloist)" = success ] || fail "it did not stop well"
    ok "it stops"
}

judge "soloist.service" 100
grep -qx "may get new privileges" "$tree.outbreak" || fail "the job does not say what it could do: the next part would prove nothing"
install -D -m 644 systemd/hardened.conf "$tree/etc/systemd/system/soloist.service.d/hardened.conf"
judge "soloist.service with hardened.conf" 20
if grep -v -e '^-- ' -e '^$' "$tree.outbreak"; then fail "a job came through (see above)"; fi
ok "no job came through"
echo "everything passed"
