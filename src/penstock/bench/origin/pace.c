/* LD_PRELOAD shim for a server, or for a client that uploads: every TCP socket that is accepted or connected gets the congestion control PACE_CC and the kernel-paced rate PACE_RATE (bytes/s).
 * PACE_TOTAL (bytes/s) is the rate of all together: whoever sends a file waits until the link has taken what was sent before, first come first served.
 * Pacing by the kernel needs no qdisc and no root; bbr, a common default, cuts loopback throughput to a third, so PACE_CC=cubic always.
 * cc -O2 -shared -fPIC pace.c -o pace.so -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>

static unsigned long rate_bytes_per_s, total_bytes_per_s;
static char congestion[16];

__attribute__((constructor)) static void read_settings(void) { /* before nginx clears its environment */
  const char *rate = getenv("PACE_RATE"), *total = getenv("PACE_TOTAL"), *name = getenv("PACE_CC");
  if (rate) rate_bytes_per_s = strtoul(rate, 0, 10);
  if (total) total_bytes_per_s = strtoul(total, 0, 10);
  if (name) strncpy(congestion, name, sizeof congestion - 1);
}

static int paced(int fd) {
  if (fd < 0) return fd;
  if (*congestion) setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, strlen(congestion));
  if (rate_bytes_per_s) setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate_bytes_per_s, sizeof rate_bytes_per_s);
  return fd;
}

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags) {
  static int (*real)(int, struct sockaddr *, socklen_t *, int);
  if (!real) real = dlsym(RTLD_NEXT, "accept4");
  return paced(real(fd, address, length, flags));
}

int accept(int fd, struct sockaddr *address, socklen_t *length) {
  static int (*real)(int, struct sockaddr *, socklen_t *);
  if (!real) real = dlsym(RTLD_NEXT, "accept");
  return paced(real(fd, address, length));
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
  static int (*real)(int, const struct sockaddr *, socklen_t);
  if (!real) real = dlsym(RTLD_NEXT, "connect");
  if (address->sa_family == AF_INET || address->sa_family == AF_INET6) paced(fd);
  return real(fd, address, length);
}

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec / 1e9;
}

ssize_t sendfile64(int target, int source, off64_t *offset, size_t count) { /* the one worker has one thread */
  static ssize_t (*real)(int, int, off64_t *, size_t);
  static double free_s;
  if (!real) real = dlsym(RTLD_NEXT, "sendfile64");
  ssize_t sent = real(target, source, offset, count);
  if (sent > 0 && total_bytes_per_s) {
    double begun_s = now_s();
    free_s = (free_s > begun_s - 0.05 ? free_s : begun_s) + sent / (double)total_bytes_per_s; /* who overslept catches up */
    double wait_s = free_s - begun_s;
    struct timespec wait = {(time_t)wait_s, (long)((wait_s - (time_t)wait_s) * 1e9)};
    if (wait_s > 0) nanosleep(&wait, 0);
  }
  return sent;
}
