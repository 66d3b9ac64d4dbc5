#!/usr/bin/env bash
# usage: host.sh FOLDER NAME, as the first process of a host's own PID, network, UTS and mount namespaces
# Gives the host its name, its view of the others and an ssh server. Mounts are private: they end with the host.
set -euo pipefail
folder=$1 name=$2
mount --make-rprivate /
hostname "$name"
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/ssh_config" /etc/ssh/ssh_config
mkdir -p /run/sshd "$folder/$name"
if [ -d "$folder/disk" ]; then mount --bind "$folder/$name" "$folder/disk"; fi # each host's own, under one path
exec "$(command -v sshd)" -D -e -f "$folder/sshd_config" -o PidFile=none
