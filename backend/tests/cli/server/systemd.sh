#!/bin/sh
# Becomes a systemd over a copy of this machine's files that lasts as long as it does. To be run as root
# in namespaces of its own: unshare --fork --pid --mount --cgroup --uts --ipc sh systemd.sh FOLDER
# It shares the network and the kernel with this machine, and so does nothing to either.
set -eu
folder=$1
mount --make-rprivate /
mount -t tmpfs none "$folder"
mkdir "$folder/upper" "$folder/work" "$folder/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"
cd "$folder/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs tmpfs run
: >etc/fstab
# What would reach the kernel, or the machine's devices.
for unit in systemd-sysctl systemd-modules-load systemd-udevd systemd-udev-trigger systemd-random-seed \
    systemd-binfmt systemd-remount-fs systemd-tmpfiles-setup systemd-tmpfiles-setup-dev; do
    ln -sf /dev/null "etc/systemd/system/$unit.service"
done
for unit in sys-kernel-debug sys-kernel-tracing sys-kernel-config dev-hugepages dev-mqueue; do
    ln -sf /dev/null "etc/systemd/system/$unit.mount"
done
mkdir -p old
pivot_root . old
umount -l /old
exec env -i container=other PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=basic.target --log-target=null
