#!/bin/bash
# One Ceph on loopback, in memory, without systemd: monitor, one OSD, RGW. Used by tests/servers/ceph.py.
#   ceph.sh up FOLDER RGW_PORT MON_PORT ACCESS_KEY SECRET_KEY     installs the packages if they are missing and root may
#   ceph.sh down FOLDER                                           ends exactly the processes that `up` recorded
set -euo pipefail

install_packages() {
  command -v radosgw ceph-mon ceph-osd monmaptool >/dev/null && return
  if [ "$(id -u)" != 0 ]; then
    echo "Ceph is missing: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd" >&2
    exit 3
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q
  apt-get install -q -y --no-install-recommends radosgw ceph-mon ceph-osd
}

record() { echo "$1 $2" >> "$folder/pids"; }

write_config() {
  local library=/usr/lib/$(uname -m)-linux-gnu
  cat > "$CEPH_CONF" <<CONF
[global]
fsid = $fsid
mon host = v1:127.0.0.1:$mon_port
ms bind ipv4 = true
ms bind msgr2 = false
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
client mount timeout = 20
rados mon op timeout = 20
run dir = $folder/run
admin socket = $folder/run/\$name.asok
log file = $folder/log/\$name.log
keyring = $folder/keyring
plugin dir = $library/ceph
osd class dir = $library/rados-classes
erasure code dir = $library/ceph/erasure-code
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon max pg per osd = 1000
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
debug none = 0/0
debug ms = 0/0
debug osd = 0/0
debug mon = 0/0
debug paxos = 0/0
debug rgw = 0/0
debug objecter = 0/0
debug rados = 0/0
[mon]
mon data = $folder/mon/\$id
mon cluster log file = $folder/log/cluster.log
mgr initial modules =
paxos propose interval = 0.05
paxos min wait = 0.01
mon tick interval = 1
[osd]
# placed in the crush map below: Ceph's own start-up command races the first monitor map
osd crush update on start = false
osd class update on start = false
osd mon shutdown timeout = 1
osd data = $folder/osd/\$id
osd objectstore = memstore
memstore device bytes = 4294967296
osd memory target = 1073741824
osd max object size = 134217728
[client]
rgw data = $folder/rgw
rgw frontends = beast endpoint=127.0.0.1:$rgw_port tcp_nodelay=1
rgw enable usage log = false
rgw enable ops log = false
rgw enable gc threads = false
rgw enable lc threads = false
rgw enable quota threads = false
rgw run sync thread = false
rgw thread pool size = 64
rgw dns name = localhost
rgw override bucket index max shards = 1
CONF
  : > "$folder/keyring"
}

# The monitor's commands by librados, which ceph-osd brings: the `ceph` tool would be another 30 MB of packages.
ask_monitor() {
  /usr/bin/python3 - "$@" <<'PY'
import json, os, rados, sys, time
cluster = rados.Rados(conffile=os.environ["CEPH_CONF"])
cluster.connect(timeout=20)
def ask(**command):
    for _ in range(100):  # the first command may be answered before the first monitor map: EPERM, "wrong fsid"
        code, answer, text = cluster.mon_command(json.dumps(command), b"")
        if not (code == -1 and "fsid" in text):
            break
        time.sleep(0.02)
    if code:
        sys.exit(f"{command}: {code} {text}")
    return answer
if sys.argv[1] == "new":
    ask(prefix="osd new", uuid=sys.argv[2])
    ask(prefix="osd crush add-bucket", name="h", type="host")
    ask(prefix="osd crush move", name="h", args=["root=default"])
    ask(prefix="osd crush add", id=0, weight=1.0, args=["host=h", "root=default"])
else:
    end = time.monotonic() + 30
    while json.loads(ask(prefix="osd stat", format="json"))["num_up_osds"] != 1:
        os.kill(int(sys.argv[2]), 0)
        if time.monotonic() > end:
            sys.exit("the OSD is not up after 30 s")
        time.sleep(0.03)
PY
}

up() {
  folder=$1 rgw_port=$2 mon_port=$3
  local access_key=$4 secret_key=$5
  install_packages
  mkdir -p "$folder"/{mon/a,osd/0,rgw,run,log}
  export CEPH_CONF=$folder/ceph.conf
  fsid=$(cat /proc/sys/kernel/random/uuid)
  local osd_uuid; osd_uuid=$(cat /proc/sys/kernel/random/uuid)
  write_config
  # the monitor finds itself in a map made by hand; left to itself it looks for the default ports
  monmaptool --create --fsid "$fsid" --addv a "[v1:127.0.0.1:$mon_port]" "$folder/monmap" >/dev/null
  ceph-mon --mkfs -i a --monmap "$folder/monmap" >/dev/null
  ceph-mon -f -i a > "$folder/log/mon.out" 2>&1 &
  record ceph-mon $!
  ask_monitor new "$osd_uuid"
  ceph-osd -i 0 --mkfs --osd-uuid "$osd_uuid" > "$folder/log/osd-mkfs.out" 2>&1
  ceph-osd -f -i 0 > "$folder/log/osd.out" 2>&1 &
  local osd=$!
  record ceph-osd $osd
  ask_monitor wait $osd
  timeout 60 radosgw-admin --no-mon-config user create --uid=penstock --display-name=penstock \
    --access-key="$access_key" --secret-key="$secret_key" > "$folder/log/user.out" 2>&1 || { cat "$folder/log/user.out"; exit 1; }
  radosgw -f -n client.rgw > "$folder/log/rgw.out" 2>&1 &
  local rgw=$!
  record radosgw $rgw
  for _ in $(seq 1 600); do
    (exec 3<>"/dev/tcp/127.0.0.1/$rgw_port") 2>/dev/null && return
    kill -0 $rgw || { tail -5 "$folder/log/rgw.out"; exit 1; }
    sleep 0.1
  done
  echo "radosgw does not listen after 60 s" >&2
  exit 1
}

alive() { [ -d "/proc/$2" ] && [ "$(cat "/proc/$2/comm" 2>/dev/null)" = "$1" ]; }

down() {
  [ -e "$1/pids" ] || return 0
  tac "$1/pids" | while read -r name pid; do alive "$name" "$pid" && kill "$pid"; done || true
  for _ in $(seq 1 50); do
    local left=0
    while read -r name pid; do alive "$name" "$pid" && left=1; done < "$1/pids"
    [ $left = 0 ] && break
    sleep 0.1
  done
  while read -r name pid; do alive "$name" "$pid" && kill -9 "$pid"; done < "$1/pids" || true
  rm -f "$1/pids"
}

case "${1:-}" in
  up) shift; up "$@" ;;
  down) down "$2" ;;
  *) sed -n '2,4p' "$0" >&2; exit 2 ;;
esac
