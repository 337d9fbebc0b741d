/* A host that is slow at one thing, for tests: to be put before libc with LD_PRELOAD.
 *
 * SLOW_CALL names the call that takes SLOW_MS: execve (a file system on the network) or getpwnam_r (a directory
 * service). Only the first such call: it makes the file SLOW_ONCE, which also tells that it has begun. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void be_slow(const char *call) {
  const char *wanted = getenv("SLOW_CALL"), *once = getenv("SLOW_ONCE"), *ms = getenv("SLOW_MS");
  if (!wanted || !once || !ms || strcmp(wanted, call)) return;
  int file = open(once, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return;
  close(file);
  struct timespec left = {atol(ms) / 1000, atol(ms) % 1000 * 1000000L};
  while (nanosleep(&left, &left) != 0) continue;
}

int execve(const char *path, char *const argv[], char *const env[]) {
  static int (*real)(const char *, char *const *, char *const *);
  be_slow("execve");
  if (!real) real = (int (*)(const char *, char *const *, char *const *))dlsym(RTLD_NEXT, "execve");
  return real(path, argv, env);
}

int getpwnam_r(const char *name, struct passwd *entry, char *buffer, size_t size, struct passwd **found) {
  static int (*real)(const char *, struct passwd *, char *, size_t, struct passwd **);
  be_slow("getpwnam_r");
  if (!real)
    real = (int (*)(const char *, struct passwd *, char *, size_t, struct passwd **))dlsym(RTLD_NEXT, "getpwnam_r");
  return real(name, entry, buffer, size, found);
}
