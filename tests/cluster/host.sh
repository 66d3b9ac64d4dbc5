#!/usr/bin/env bash
# usage: host.sh FOLDER NAME, as the first process of a host's own network, UTS, PID and mount namespaces
# Gives the host its name, its view of the others and an ssh server. Mounts are private: they end with the host.
set -euo pipefail
folder=$1 name=$2
hostname "$name"
mount -t sysfs none /sys # tells of this network, not of the machine's
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/ssh_config" /etc/ssh/ssh_config
mkdir -p /run/sshd
"$(command -v sshd)" -E "$folder/$name.log" -f "$folder/sshd_config" -o PidFile=none
sleep infinity & # the host outlives its ssh server
wait
