#!/usr/bin/env bash
# A real S3 server on this machine: Ceph RGW with one monitor and one OSD on a plain file, from Debian's packages.
#
#   rgw.sh install                      install the packages with apt-get (as root)
#   rgw.sh start FOLDER PORT [WATCHED]  a new server on 127.0.0.1:PORT with all its state in FOLDER, which must be new
#                                       or empty; prints one JSON document: endpoint, access_key, secret_key, bucket,
#                                       pids. It ends by itself when the process WATCHED ends.
#   rgw.sh stop FOLDER                  end what start began, and nothing else; the folder stays
#   rgw.sh kill FOLDER PART             SIGKILL for one part: mon, osd or radosgw
#   rgw.sh restart FOLDER PART          start a part again that was killed, and wait until it serves
#
# For tests and trials: one copy of each object, no encryption on the wire, loopback only. No systemd, no ceph-mgr.
# Keys are made by the server; they are in FOLDER/server.json, which only its owner may read, and on standard output.
set -euo pipefail
umask 077

packages=(radosgw ceph-mon ceph-osd ceph-base ceph-common curl)
programs=(radosgw radosgw-admin ceph-mon ceph-osd ceph ceph-authtool monmaptool curl python3)
bucket=headrace
osd_bytes=$((32 << 30)) # of a sparse file
patience=90             # seconds that one step may take; the slowest takes about 10

fail() {
    echo "rgw.sh: $*" >&2
    exit 1
}

install_packages() {
    local log
    if have_programs; then
        return
    fi
    log="$(mktemp)"
    for _ in 1 2; do
        if { apt-get -q update && apt-get -q -y install --no-install-recommends "${packages[@]}"; } \
            </dev/null >"$log" 2>&1 && have_programs; then
            rm -f "$log"
            return
        fi
        sleep 5
    done
    tail -n 20 "$log" >&2
    fail "apt-get did not install ${packages[*]}; its output is in $log"
}

have_programs() {
    command -v "${programs[@]}" >/dev/null && [ "$(command -v "${programs[@]}" | wc -l)" -eq "${#programs[@]}" ]
}

# step NAME COMMAND...: run it within the patience; its output goes to FOLDER/start.log and is shown when it fails.
step() {
    local name="$1" code=0
    shift
    timeout --kill-after=5 "$patience" "$@" </dev/null >>"$folder/start.log" 2>&1 || code=$?
    if [ "$code" -ne 0 ]; then
        tail -n 20 "$folder/start.log" >&2
        fail "$name failed with exit code $code (124: longer than $patience s)"
    fi
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

started_at() { # PID: when the process started, so that a number that is used again is not taken for it
    local stat
    stat="$(cat "/proc/$1/stat" 2>/dev/null)" || return 1
    stat="${stat##*) }"
    cut -d' ' -f20 <<<"$stat"
}

# launch PART COMMAND...: in the background, in a session of its own, with PID and start time in FOLDER/PART.pid.
launch() {
    local part="$1" pid
    shift
    setsid "$@" </dev/null >>"$folder/$part.log" 2>&1 &
    pid=$!
    echo "$pid $(started_at "$pid")" >"$folder/$part.pid"
}

alive() { # PART: also while only some of its threads have ended: the others still hold its locks
    local pid start states
    read -r pid start 2>/dev/null <"$folder/$1.pid" || return 1
    [ "$(started_at "$pid")" = "$start" ] || return 1
    states="$(grep -hs '^State:' "/proc/$pid/task/"*/status || true)" # whole, and not through a pipe that ends early
    [ -n "$states" ] && grep -qv 'Z (zombie)' <<<"$states"
}

signal_part() { # SIGNAL PART: send it, and wait until the process is gone
    local pid
    alive "$2" || return 0
    read -r pid _ <"$folder/$2.pid"
    kill -s "$1" "$pid" 2>/dev/null || true
    for _ in $(seq 30); do
        alive "$2" || return 0
        sleep 0.1
    done
    kill -s KILL "$pid" 2>/dev/null || true
}

start_part() { # mon, osd or radosgw
    case "$1" in
        mon) launch mon ceph-mon -f -i a --conf "$folder/ceph.conf" ;;
        osd) launch osd ceph-osd -f -i 0 --conf "$folder/ceph.conf" ;;
        radosgw) launch radosgw radosgw -f -n client.rgw --conf "$folder/ceph.conf" ;;
        *) fail "there is no part $1; there are mon, osd, radosgw" ;;
    esac
}

wait_part() { # PART: until it serves; it must stay alive meanwhile
    local end=$((SECONDS + patience))
    until "serves_$1" >>"$folder/start.log" 2>&1; do
        alive "$1" || { tail -n 20 "$folder/$1.log" >&2; fail "$1 ended at its start"; }
        [ "$SECONDS" -lt "$end" ] || { tail -n 20 "$folder/$1.log" >&2; fail "$1 does not serve after $patience s"; }
        sleep 0.1
    done
}

serves_mon() { ask mon stat; }
serves_radosgw() { curl -fsS -o /dev/null --max-time 5 "http://127.0.0.1:$(cat "$folder/port")/"; }

serves_osd() { # after a kill, the monitor goes on saying "up" for a while: each start has a number of its own
    local epoch
    epoch="$(ask osd dump | sed -n 's/^osd\.0 up .* up_from \([0-9]*\) .*/\1/p')"
    [ -n "$epoch" ] && [ "$epoch" != "$(cat "$folder/osd.epoch" 2>/dev/null)" ] && echo "$epoch" >"$folder/osd.epoch"
}

ask() { # the monitor, within bounds
    timeout --kill-after=5 30 ceph --conf "$folder/ceph.conf" --connect-timeout 20 "$@" </dev/null
}

write_config() { # MON_PORT
    cat >"$folder/ceph.conf" <<CONF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon host = [v2:127.0.0.1:$1/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
# Without cephx, radosgw of this version hangs at its start.
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = $folder/\$name.keyring
run dir = $folder
admin socket =
log file = $folder/\$name.ceph.log
mon cluster log file = $folder/cluster.log
mon data = $folder/mon
mon data avail warn = 1
mon data avail crit = 1
mon allow pool size one = true
mon pg warn min per osd = 0
osd data = $folder/osd
osd objectstore = bluestore
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd memory target = 939524096
# One OSD: nobody else can report it, so the monitor learns from its silence soon.
osd heartbeat grace = 5
bluestore block create = true
bluestore block size = $osd_bytes
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$port
rgw thread pool size = 64
rgw enable usage log = false
rgw enable ops log = false
CONF
}

make_monitor() { # MON_PORT
    local fsid
    fsid="$(sed -n 's/^fsid = //p' "$folder/ceph.conf")"
    step "making the monitor's key" ceph-authtool --create-keyring "$folder/mon.a.keyring" --gen-key -n mon. --cap mon 'allow *'
    step "making the administrator's key" ceph-authtool --create-keyring "$folder/client.admin.keyring" --gen-key \
        -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
    step "joining the keys" ceph-authtool "$folder/mon.a.keyring" --import-keyring "$folder/client.admin.keyring"
    step "making the monitor's map" monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$1]" "$folder/monmap"
    step "making the monitor" ceph-mon --mkfs -i a --conf "$folder/ceph.conf" --monmap "$folder/monmap" --keyring "$folder/mon.a.keyring"
    start_part mon
    wait_part mon
}

make_osd() {
    local uuid
    uuid="$(cat /proc/sys/kernel/random/uuid)"
    mkdir "$folder/osd"
    step "announcing the OSD" ceph --conf "$folder/ceph.conf" --connect-timeout 20 osd create "$uuid"
    step "making the OSD's key" ceph-authtool --create-keyring "$folder/osd.0.keyring" --gen-key -n osd.0
    step "registering the OSD" ceph --conf "$folder/ceph.conf" --connect-timeout 20 auth add osd.0 \
        mon 'allow profile osd' osd 'allow *' -i "$folder/osd.0.keyring"
    step "making the OSD" ceph-osd -i 0 --mkfs --osd-uuid "$uuid" --conf "$folder/ceph.conf"
    start_part osd
    wait_part osd
}

make_gateway() {
    step "registering the gateway" ceph --conf "$folder/ceph.conf" --connect-timeout 20 auth get-or-create client.rgw \
        mon 'allow rw' osd 'allow rwx' -o "$folder/client.rgw.keyring"
    timeout --kill-after=5 "$patience" radosgw-admin --conf "$folder/ceph.conf" -n client.rgw user create \
        --uid headrace --display-name headrace </dev/null >"$folder/user.json" 2>>"$folder/start.log" ||
        { tail -n 20 "$folder/start.log" >&2; fail "making the user failed"; }
    start_part radosgw
    wait_part radosgw
}

describe() { # write FOLDER/server.json
    python3 - "$folder" "http://127.0.0.1:$port" "$bucket" >"$folder/server.json" <<'PYTHON'
import json, pathlib, sys

folder, endpoint, bucket = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
keys = json.loads((folder / "user.json").read_text())["keys"][0]
pids = {part: int((folder / f"{part}.pid").read_text().split()[0]) for part in ("mon", "osd", "radosgw")}
print(json.dumps({
    "endpoint": endpoint, "access_key": keys["access_key"], "secret_key": keys["secret_key"],
    "bucket": bucket, "pids": pids,
}))
PYTHON
    rm -f "$folder/user.json"
}

make_bucket() {
    local nothing
    nothing="$(sha256sum </dev/null | cut -d' ' -f1)" # of the empty body; this version of curl leaves it out
    # The keys travel through curl's standard input: what stands on a command line, everybody on the machine can read.
    python3 -c 'import json, sys; s = json.load(open(sys.argv[1])); print("user = \"%s:%s\"" % (s["access_key"], s["secret_key"]))' \
        "$folder/server.json" |
        curl -fsS -o /dev/null --max-time "$patience" -K - --aws-sigv4 "aws:amz:us-east-1:s3" -X PUT \
            -H "x-amz-content-sha256: $nothing" "http://127.0.0.1:$port/$bucket" ||
        fail "making the bucket failed"
}

start() {
    local mon_port
    have_programs || fail "the packages are missing; as root: $0 install"
    mkdir -p "$folder"
    [ -z "$(ls -A "$folder")" ] || fail "$folder is not empty"
    echo "$port" >"$folder/port"
    mon_port="$(free_port)"
    trap stop EXIT
    write_config "$mon_port"
    make_monitor "$mon_port"
    make_osd
    make_gateway
    describe
    make_bucket
    trap - EXIT
    if [ -n "${1:-}" ]; then
        setsid "$0" watch "$folder" "$1" "$(started_at "$1")" </dev/null >>"$folder/watch.log" 2>&1 &
    fi
    cat "$folder/server.json"
}

watch() { # PID START_TIME
    while [ "$(started_at "$1")" = "$2" ] && alive mon; do
        sleep 1
    done
    stop
}

stop() {
    for part in radosgw osd mon; do
        signal_part TERM "$part"
    done
}

command="${1:-}"
case "$command" in
    install) install_packages ;;
    start | stop | kill | restart | watch)
        [ $# -ge 2 ] || fail "$command needs a folder; see the top of this file"
        folder="$(realpath -m "$2")"
        case "$command" in
            start)
                port="${3:?start needs a port}"
                start "${4:-}"
                ;;
            stop) stop ;;
            kill) signal_part KILL "${3:?kill needs a part: mon, osd or radosgw}" ;;
            restart)
                start_part "${3:?restart needs a part: mon, osd or radosgw}"
                wait_part "$3"
                ;;
            watch) watch "$3" "$4" ;;
        esac
        ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2 && exit 2 ;;
esac
