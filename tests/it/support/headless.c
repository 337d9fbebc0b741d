/* headless FILE: the first thread ends, another writes the pid into FILE and goes on for ever. Shows as a zombie. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

static void *live(void *file) {
  FILE *f = fopen(file, "w");
  if (!f || fprintf(f, "%d\n", (int)getpid()) < 0 || fclose(f) != 0) _exit(99);
  for (;;) pause();
}

int main(int argc, char **argv) {
  pthread_t thread;
  if (argc != 2) return 64;
  signal(SIGTERM, SIG_IGN);
  if (pthread_create(&thread, NULL, live, argv[1]) != 0) return 98;
  pthread_exit(NULL);
}
