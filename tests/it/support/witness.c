/* The job of the black-box tests: writes down that it runs.
 *
 * witness FILE [for=MS] [beat=MS] [exit=CODE] [life=MS] [ignore-term] [daemon] [setsid]
 *
 * One line for each event, in one write to a file opened with O_APPEND:
 *   job occurrence_ms token attempt instance trigger run root pid event boottime_ns realtime_us
 * root: process id of the command; pid: of the process that writes. Events: start, beat, end.
 * Blanks fill each line up to 256 bytes: the kernel may cut a write short between two pages when its process is killed,
 * and no such line reaches into a second page.
 * Times come from raw system calls, so that libfaketime does not change them.
 * A daemon or setsid child beats for `life`, whatever becomes of the command. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int file, root;
enum { LINE = 256 };
static char prefix[1024];

static long long now(int clock) {
  struct timespec t;
  syscall(SYS_clock_gettime, clock, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void note(const char *event) {
  char line[2048];
  int n = snprintf(line, sizeof line, "%s %d %d %s %lld %lld\n", prefix, root, (int)syscall(SYS_getpid), event,
                   now(CLOCK_BOOTTIME), now(CLOCK_REALTIME) / 1000);
  int length = LINE;
  while (length < n) length *= 2;
  memset(line + n - 1, ' ', length - n);
  line[length - 1] = '\n';
  if (write(file, line, length) != length) _exit(99);
}

static void beat_for(long ms, long beat) {
  long long end = now(CLOCK_BOOTTIME) + ms * 1000000LL;
  for (;;) {
    long long left = end - now(CLOCK_BOOTTIME);
    if (left <= 0) return;
    long long nap = left < beat * 1000000LL ? left : beat * 1000000LL;
    struct timespec t = {nap / 1000000000LL, nap % 1000000000LL};
    syscall(SYS_nanosleep, &t, NULL);
    if (nap < left) note("beat");
  }
}

static const char *env(const char *name) {
  const char *value = getenv(name);
  return value && *value ? value : "?";
}

int main(int argc, char **argv) {
  long ms = 0, beat = 20, code = 0, life = 60000;
  int ignore = 0, daemon = 0, session = 0;
  if (argc < 2) return 64;
  for (int i = 2; i < argc; i++) {
    if (!strncmp(argv[i], "for=", 4)) ms = atol(argv[i] + 4);
    else if (!strncmp(argv[i], "beat=", 5)) beat = atol(argv[i] + 5);
    else if (!strncmp(argv[i], "exit=", 5)) code = atol(argv[i] + 5);
    else if (!strncmp(argv[i], "life=", 5)) life = atol(argv[i] + 5);
    else if (!strcmp(argv[i], "ignore-term")) ignore = 1;
    else if (!strcmp(argv[i], "daemon")) daemon = 1;
    else if (!strcmp(argv[i], "setsid")) session = 1;
    else return 64;
  }
  file = open(argv[1], O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0) { perror(argv[1]); return 98; }
  root = getpid();
  snprintf(prefix, sizeof prefix, "%s %s %s %s %s %s %s", env("SOLOIST_JOB"), env("SOLOIST_OCCURRENCE_MS"),
           env("SOLOIST_FENCING_TOKEN"), env("SOLOIST_ATTEMPT"), env("SOLOIST_INSTANCE"), env("SOLOIST_TRIGGER"),
           env("SOLOIST_RUN_ID"));
  if (ignore) { signal(SIGTERM, SIG_IGN); signal(SIGINT, SIG_IGN); signal(SIGHUP, SIG_IGN); }
  note("start");
  if (session && fork() == 0) {
    setsid();
    note("start");
    beat_for(life, beat);
    _exit(0);
  }
  if (daemon && fork() == 0) {
    setsid();
    if (fork() != 0) _exit(0);
    if (chdir("/") != 0) _exit(97);
    close(0); close(1); close(2);
    note("start");
    beat_for(life, beat);
    _exit(0);
  }
  beat_for(ms, beat);
  note("end");
  return code;
}
