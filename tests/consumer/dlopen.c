/* A plugin host: finds the library at run time, asks it something, and lets it go again. */
#include <kvpage.h>

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    if (argc != 2) return 2;
    for (int round = 0; round < 3; round++) {
        void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        uint32_t (*version)(void);
        const char *(*name)(kvp_status);
        *(void **)&version = dlsym(library, "kvp_version");
        *(void **)&name = dlsym(library, "kvp_status_name");
        if (!version || !name) return 1;
        if (version() >> 16 != KVP_VERSION_MAJOR) return 1;
        if (strcmp(name(KVP_ERR_BUSY), "KVP_ERR_BUSY") != 0) return 1;
        if (dlsym(library, "kvp__fail") || dlsym(library, "kvp__alloc")) return 1;
        if (dlclose(library)) return 1;
    }
    puts("dlopen: good");
    return 0;
}
