/* unruly MODE FILE: processes that are hard to be rid of. Each ignores SIGTERM, and ends by itself after two minutes. FILE gets
 * the pid of the first one when all is set up.
 *
 * crowd    five hundred children, to be looked through by who looks for others
 * comet    two that fork and end, over and over: their pids change all the time
 * swarm    the same, but the first thread of each ends at once (it shows as a zombie), and another forks and lives on for a while */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static time_t begun;
static int sessions;

static time_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_BOOTTIME, &t);
  return t.tv_sec;
}

static void live(void) {
  if (now() - begun > 120) _exit(0);
}

static void told(const char *file) {
  char new[4096];
  snprintf(new, sizeof new, "%s.new", file);
  FILE *f = fopen(new, "w");
  if (!f || fprintf(f, "%d\n", (int)getpid()) < 0 || fclose(f) != 0 || rename(new, file) != 0) _exit(99);
}

static void crowd(void) {
  for (int i = 0; i < 500; i++)
    if (fork() == 0) {
      signal(SIGTERM, SIG_DFL);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) pause();
    }
}

static void comet(void) {
  for (;;) {
    pid_t child = fork();
    if (child > 0) _exit(0);
    if (child == 0) setsid();
    usleep(100);
    live();
  }
}

static void headless(void);

static void *next(void *nothing) {
  (void)nothing;
  live();
  usleep(1000);
  if (fork() == 0) {
    if (sessions) setsid();
    headless();
  }
  usleep(20000);
  _exit(0);
}

static void headless(void) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, next, NULL) != 0) _exit(98);
  pthread_exit(NULL);
}

int main(int argc, char **argv) {
  if (argc != 3) return 64;
  const char *mode = argv[1];
  begun = now();
  signal(SIGTERM, SIG_IGN);
  if (!strcmp(mode, "crowd")) crowd();
  told(argv[2]);
  if (!strcmp(mode, "comet")) {
    fork();
    comet();
  }
  if (!strcmp(mode, "swarm")) {
    sessions = 1;
    headless();
  }
  for (;;) {
    live();
    sleep(1);
  }
}
