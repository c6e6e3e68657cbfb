/* LD_PRELOAD shim for a server: every accepted TCP socket gets the congestion control PACE_CC and the kernel-paced rate PACE_RATE (bytes/s).
 * Pacing by the kernel needs no qdisc and no root; bbr, a common default, cuts loopback throughput to a third, so PACE_CC=cubic always.
 * cc -O2 -shared -fPIC pace.c -o pace.so -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static unsigned long rate_bytes_per_s;
static char congestion[16];

__attribute__((constructor)) static void read_settings(void) { /* before nginx clears its environment */
  const char *rate = getenv("PACE_RATE"), *name = getenv("PACE_CC");
  if (rate) rate_bytes_per_s = strtoul(rate, 0, 10);
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
