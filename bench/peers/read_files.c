/* Reads files from a directory with threads, in blocks of 1 MiB or at random, and says how long that took. It costs little itself.

     read_files whole THREADS            the paths on standard input, each read to its end; threads take the next one
     read_files random THREADS COUNT SEED  COUNT blocks of 256 KiB of the one path on standard input
     read_files chunks THREADS COUNT SEED BYTES  COUNT different blocks of BYTES of the one path, in random order
     read_files stream                   standard input itself, timed from its first byte

   With CHECK in the environment, the answer depends on every byte and where it lies. The answer is one line of JSON. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 1 << 20, RANDOM_BLOCK = 256 << 10 };

static long random_block = RANDOM_BLOCK;
static long *places; /* the blocks to read, if each is to be read once */
static char **paths;
static long paths_count, random_count, seed;
static long next_index, total_bytes;
static uint64_t check_sum;
static int checks, is_random, is_chunks;

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t mixed(uint64_t value) {
    value ^= value >> 33;
    value *= 0xff51afd7ed558ccdULL;
    value ^= value >> 33;
    return value;
}

static uint64_t checked(const unsigned char *data, long length, uint64_t place) {
    uint64_t sum = 0;
    for (long at = 0; at < length; at += 8) {
        uint64_t word = 0;
        memcpy(&word, data + at, length - at < 8 ? length - at : 8);
        sum += mixed(word + (place + at) * 0x9e3779b97f4a7c15ULL);
    }
    return sum;
}

static void count(const unsigned char *data, long length, uint64_t place) {
    __atomic_add_fetch(&total_bytes, length, __ATOMIC_RELAXED);
    if (checks) __atomic_add_fetch(&check_sum, checked(data, length, place), __ATOMIC_RELAXED);
}

static void read_whole(long index, unsigned char *block) {
    int file = open(paths[index], O_RDONLY);
    if (file < 0) fail(paths[index]);
    long offset = 0, filled = 0, length;
    while ((length = read(file, block + filled, BLOCK - filled)) != 0) {
        if (length < 0) fail(paths[index]);
        filled += length;
        if (filled == BLOCK) {
            count(block, filled, ((uint64_t)index << 40) + offset);
            offset += filled;
            filled = 0;
        }
    }
    count(block, filled, ((uint64_t)index << 40) + offset);
    close(file);
}

static void read_random(int file, long blocks, long index, unsigned char *block) {
    long place = places ? places[index] : (long)(mixed(index * 0x9e3779b97f4a7c15ULL + seed + 1) % blocks);
    long offset = place * random_block;
    for (long filled = 0; filled < random_block;) {
        long length = pread(file, block + filled, random_block - filled, offset + filled);
        if (length <= 0) fail(paths[0]);
        filled += length;
    }
    count(block, random_block, ((uint64_t)index << 40) + offset);
}

/* Chooses random_count of the file's blocks, each at most once: the page cache would answer the second time. */
static void choose_places(void) {
    struct stat status;
    if (stat(paths[0], &status)) fail(paths[0]);
    long blocks = status.st_size / random_block;
    if (random_count > blocks) random_count = blocks;
    places = malloc(blocks * sizeof *places);
    for (long at = 0; at < blocks; at++) places[at] = at;
    for (long at = 0; at < random_count; at++) {
        long other = at + (long)(mixed(at * 0x9e3779b97f4a7c15ULL + seed + 1) % (blocks - at));
        long place = places[other];
        places[other] = places[at];
        places[at] = place;
    }
}

static void *work(void *unused) {
    unsigned char *block = malloc(random_block > BLOCK ? random_block : BLOCK);
    int file = -1;
    struct stat status = {0};
    if (is_random) {
        file = open(paths[0], O_RDONLY);
        if (file < 0 || fstat(file, &status)) fail(paths[0]);
    }
    long index, last = is_random ? random_count : paths_count;
    while ((index = __atomic_fetch_add(&next_index, 1, __ATOMIC_RELAXED)) < last) {
        if (is_random) read_random(file, status.st_size / random_block, index, block);
        else read_whole(index, block);
    }
    if (file >= 0) close(file);
    free(block);
    return unused;
}

static double read_stream(void) {
    unsigned char *block = malloc(BLOCK);
    double begun_s = 0;
    long length, place = 0;
    while ((length = read(0, block, BLOCK)) != 0) {
        if (length < 0) fail("standard input");
        if (!begun_s) begun_s = now_s();
        count(block, length, place);
        place += length;
    }
    return now_s() - begun_s;
}

static double read_paths(int threads_count) {
    size_t room = 0;
    char *line = NULL;
    ssize_t length;
    while ((length = getline(&line, &room, stdin)) > 0) {
        if (line[length - 1] == '\n') line[length - 1] = 0;
        paths = realloc(paths, (paths_count + 1) * sizeof *paths);
        paths[paths_count++] = strdup(line);
    }
    if (is_chunks) choose_places();
    pthread_t threads[threads_count];
    double begun_s = now_s();
    for (int index = 0; index < threads_count; index++)
        if (pthread_create(&threads[index], NULL, work, NULL)) fail("pthread_create");
    for (int index = 0; index < threads_count; index++) pthread_join(threads[index], NULL);
    return now_s() - begun_s;
}

int main(int count_of_words, char **words) {
    if (count_of_words < 2) return 2;
    checks = getenv("CHECK") != NULL;
    is_chunks = !strcmp(words[1], "chunks");
    is_random = is_chunks || !strcmp(words[1], "random");
    if (is_chunks) random_block = atol(words[5]);
    if (is_random) {
        random_count = atol(words[3]);
        seed = atol(words[4]);
    }
    double seconds = !strcmp(words[1], "stream") ? read_stream() : read_paths(atoi(words[2]));
    long objects = is_random ? random_count : paths_count;
    printf("{\"seconds\": %.6f, \"bytes\": %ld, \"objects\": %ld, \"check\": %lu}\n", seconds, total_bytes, objects,
           (unsigned long)check_sum);
    return 0;
}
