/*
 * The kernels inside the library: one fatbin for each kernel file, as nvcc made them. The Makefile
 * lists them in the header KVP__CUDA_IMAGES; without nvcc there are none, and the device says so.
 */
#include "cuda/api.h"

#ifdef KVP__CUDA_IMAGES

#define IMAGE(file, path)                                                                          \
    __asm__(".section .rodata\n"                                                                   \
            ".balign 64\n"                                                                         \
            "kvp__cuda_image_" #file ":\n"                                                         \
            ".incbin \"" path "\"\n"                                                               \
            ".previous\n");                                                                        \
    extern const unsigned char kvp__cuda_image_##file[];
#include KVP__CUDA_IMAGES
#undef IMAGE

const kvp__cuda_image kvp__cuda_images[] = {
#define IMAGE(file, path) {#file, kvp__cuda_image_##file},
#include KVP__CUDA_IMAGES
#undef IMAGE
};
const uint32_t kvp__cuda_n_images = sizeof kvp__cuda_images / sizeof *kvp__cuda_images;
const uint32_t kvp__cuda_toolkit = KVP__CUDA_TOOLKIT;

#else

const kvp__cuda_image kvp__cuda_images[] = {{0, 0}};
const uint32_t kvp__cuda_n_images = 0;
const uint32_t kvp__cuda_toolkit = 0;

#endif
