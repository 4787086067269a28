/* A driver without libFuzzer: runs every file of a corpus, then inputs that are made of them by random changes.
 *
 *     fuzz_http_head CORPUS_DIRECTORY RUNS SEED
 *
 * It knows nothing of coverage, and so finds less than libFuzzer; it runs wherever the kernel itself can be built.
 */
#include "harness.h"
#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#define MAX_FILES 4096
#define MAX_INPUT_BYTES 4096

static struct {
    uint8_t *data;
    size_t size;
} corpus[MAX_FILES];
static unsigned n_files;

static uint64_t state;

static uint64_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static size_t below(size_t limit) { return limit ? (size_t)(next_random() % limit) : 0; }

static void read_corpus(const char *directory) {
    char path[4096];
    DIR *opened = opendir(directory);
    struct dirent *found;
    while (opened && (found = readdir(opened)) && n_files < MAX_FILES) {
        snprintf(path, sizeof path, "%s/%s", directory, found->d_name);
        FILE *file = found->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (!file)
            continue;
        uint8_t *data = malloc(1 << 20);
        size_t size = data ? fread(data, 1, 1 << 20, file) : 0;
        fclose(file);
        corpus[n_files].data = data;
        corpus[n_files++].size = size;
    }
    if (opened)
        closedir(opened);
}

/* The input that runs now, so that a crash can be reproduced. */
static uint8_t current[2 * MAX_INPUT_BYTES];
static size_t current_size;

static void save_input(int number) {
    FILE *file = fopen("crash-input", "wb");
    if (file) {
        fwrite(current, 1, current_size, file);
        fclose(file);
    }
    fprintf(stderr, "the input is in ./crash-input\n");
    signal(number, SIG_DFL);
    raise(number);
}

static void insert_bytes(size_t at, const uint8_t *data, size_t n) {
    if (current_size + n > sizeof current)
        return;
    memmove(current + at + n, current + at, current_size - at);
    memmove(current + at, data, n);
    current_size += n;
}

static void remove_bytes(size_t at, size_t n) {
    memmove(current + at, current + at + n, current_size - at - n);
    current_size -= n;
}

static void change_once(void) {
    static const char *const interesting[] = {"\r\n", "\r\n\r\n", "\"", "\\", "\\u", "{", "}", "[", "]", ":", ",", " ", "\t",
                                              "0", "1", "f", "\0", "000000000000000", "\xff", "\x80", "\xf0\x9f\x98\x80", "chunked", "usage"};
    size_t at = below(current_size + 1), left = current_size - at, n = 1 + below(left < 64 ? left : 64);
    uint8_t some[64];
    switch (below(8)) {
    case 0:
        if (left)
            current[at] ^= (uint8_t)(1u << below(8));
        break;
    case 1:
        if (left)
            current[at] = (uint8_t)next_random();
        break;
    case 2:
        if (left >= n)
            remove_bytes(at, n);
        break;
    case 3: { /* repeat a part */
        size_t length = left < sizeof some ? left : sizeof some;
        memcpy(some, current + at, length);
        insert_bytes(below(current_size + 1), some, length);
        break;
    }
    case 4: {
        const char *text = interesting[below(sizeof interesting / sizeof *interesting)];
        insert_bytes(at, (const uint8_t *)text, *text ? strlen(text) : 1);
        break;
    }
    case 5:
        for (size_t i = 0; i < sizeof some; i++)
            some[i] = (uint8_t)next_random();
        insert_bytes(at, some, n);
        break;
    case 6: { /* go on like another file */
        unsigned other = (unsigned)below(n_files);
        size_t from = below(corpus[other].size + 1), length = corpus[other].size - from;
        current_size = at;
        insert_bytes(at, corpus[other].data + from, length < MAX_INPUT_BYTES - at ? length : MAX_INPUT_BYTES - at);
        break;
    }
    default:
        if (left && current[at] >= '0' && current[at] <= '9')
            current[at] = (uint8_t)('0' + below(10));
    }
    if (current_size > MAX_INPUT_BYTES)
        current_size = MAX_INPUT_BYTES;
}

int main(int count, char **arguments) {
    if (count != 4) {
        fprintf(stderr, "usage: %s CORPUS_DIRECTORY RUNS SEED\n", arguments[0]);
        return 2;
    }
    signal(SIGABRT, save_input);
    signal(SIGSEGV, save_input);
    read_corpus(arguments[1]);
    state = strtoull(arguments[3], NULL, 10) * 2 + 1;
    unsigned long long runs = strtoull(arguments[2], NULL, 10), done = 0;
    for (unsigned i = 0; i < n_files; i++, done++) {
        current_size = corpus[i].size < sizeof current ? corpus[i].size : sizeof current;
        memcpy(current, corpus[i].data, current_size);
        LLVMFuzzerTestOneInput(current, current_size);
    }
    for (; done < runs; done++) {
        unsigned from = (unsigned)below(n_files);
        current_size = n_files ? corpus[from].size : 0;
        current_size = current_size < MAX_INPUT_BYTES ? current_size : MAX_INPUT_BYTES;
        if (current_size)
            memcpy(current, corpus[from].data, current_size);
        for (size_t changes = 1 + below(8); changes--;)
            change_once();
        LLVMFuzzerTestOneInput(current, current_size);
    }
    printf("%llu inputs\n", done);
    fflush(stdout);
    for (unsigned i = 0; i < n_files; i++)
        free(corpus[i].data);
    return 0;
}
