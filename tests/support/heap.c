/* See heap.h. In front of each block lies a line with its size. */
#define _GNU_SOURCE
#include "heap.h"

#include <stdlib.h>
#include <string.h>

#define LINE 64u

static void *heap_alloc(void *user, size_t size, size_t align)
{
    heap *h = user;
    void *p = NULL;
    if (++h->calls == h->refuse) return NULL;
    if (align > LINE || posix_memalign(&p, LINE, size + LINE) != 0) return NULL;
    memcpy(p, &size, sizeof size);
    memset((char *)p + LINE, 0xa5, size); /* nobody may count on zeros */
    h->live += size;
    h->blocks++;
    if (h->live > h->peak) h->peak = h->live;
    return (char *)p + LINE;
}

static void heap_free(void *user, void *ptr, size_t size, size_t align)
{
    heap *h = user;
    size_t was;
    (void)align;
    memcpy(&was, (char *)ptr - LINE, sizeof was);
    h->mismatches += was != size;
    h->live -= was;
    h->blocks--;
    free((char *)ptr - LINE);
}

void heap_init(heap *h)
{
    memset(h, 0, sizeof *h);
    h->given.size = sizeof h->given;
    h->given.user = h;
    h->given.alloc = heap_alloc;
    h->given.free = heap_free;
    (void)kvp__hooks_fill(&h->hooks, &h->given, NULL);
}
