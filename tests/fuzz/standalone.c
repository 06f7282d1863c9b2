/*
 * Runs a fuzz target over files without a fuzzer, so that every compiler can replay the seeds and
 * what was once found: program file-or-folder...
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int run_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f) return -1;
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    /* Exactly the file's bytes, so that a sanitizer sees a read beyond them. */
    uint8_t *data = malloc(size > 0 ? (size_t)size : 1);
    int ok = data && size >= 0 && fread(data, 1, (size_t)size, f) == (size_t)size;
    fclose(f);
    if (ok) LLVMFuzzerTestOneInput(data, (size_t)size);
    free(data);
    return ok ? 1 : -1;
}

static int run_path(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir) return run_file(path);
    int count = 0;
    for (struct dirent *e; count >= 0 && (e = readdir(dir));) {
        char file[4096];
        if (e->d_name[0] == '.') continue;
        if (snprintf(file, sizeof file, "%s/%s", path, e->d_name) >= (int)sizeof file) count = -1;
        else if (run_file(file) < 0) count = -1;
        else count++;
    }
    closedir(dir);
    return count;
}

int main(int argc, char **argv)
{
    int total = 0;
    for (int i = 1; i < argc; i++) {
        int n = run_path(argv[i]);
        if (n < 0) {
            fprintf(stderr, "%s: cannot be read\n", argv[i]);
            return 1;
        }
        total += n;
    }
    printf("%d inputs\n", total);
    return total ? 0 : 1;
}
