/*
 * covey_support.h: what a freestanding module needs before it can do anything: memory functions, an
 * allocator behind covey_alloc/covey_free, and error texts behind covey_error.
 *
 * In exactly one source file of the package:
 *
 *     #define COVEY_SUPPORT_IMPLEMENTATION
 *     #include "covey_support.h"
 *
 * All others include it without the define.
 */
#ifndef COVEY_SUPPORT_H
#define COVEY_SUPPORT_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include "covey.h"

void *memset(void *target, int value, size_t bytes);
void *memcpy(void *restrict target, const void *restrict source, size_t bytes);
void *memmove(void *target, const void *source, size_t bytes);
int memcmp(const void *left, const void *right, size_t bytes);

/*
 * Writes the text of covey_error() and returns `status`, so that a check is one line:
 *
 *     if (label > 9) return covey_fail(COVEY_BAD_DATA, "image %u: label %u is above 9", i, label);
 *
 * Understands %u (uint32_t), %d (int32_t), %s and %%; longer texts are cut.
 */
int32_t covey_fail(int32_t status, const char *format, ...);

#endif

#if defined(COVEY_SUPPORT_IMPLEMENTATION) && !defined(COVEY_SUPPORT_IMPLEMENTED)
#define COVEY_SUPPORT_IMPLEMENTED

/* ---- Memory functions ----------------------------------------------------------------------
 * The compiler turns loops such as these into calls of the very functions they define: no_builtin
 * forbids it. Large copies in package code become memory.copy and memory.fill and don't come here.
 */

__attribute__((no_builtin("memset")))
void *memset(void *target, int value, size_t bytes) {
    unsigned char *to = target;
    for (size_t i = 0; i < bytes; i++) to[i] = (unsigned char)value;
    return target;
}

__attribute__((no_builtin("memcpy", "memmove")))
void *memcpy(void *restrict target, const void *restrict source, size_t bytes) {
    unsigned char *to = target;
    const unsigned char *from = source;
    for (size_t i = 0; i < bytes; i++) to[i] = from[i];
    return target;
}

__attribute__((no_builtin("memcpy", "memmove")))
void *memmove(void *target, const void *source, size_t bytes) {
    unsigned char *to = target;
    const unsigned char *from = source;
    if ((uintptr_t)to < (uintptr_t)from) {
        for (size_t i = 0; i < bytes; i++) to[i] = from[i];
    } else {
        for (size_t i = bytes; i > 0; i--) to[i - 1] = from[i - 1];
    }
    return target;
}

__attribute__((no_builtin("memcmp")))
int memcmp(const void *left, const void *right, size_t bytes) {
    const unsigned char *a = left, *b = right;
    for (size_t i = 0; i < bytes; i++) {
        if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
    }
    return 0;
}

/* ---- Allocator -----------------------------------------------------------------------------
 * First fit over a list of free blocks in address order; neighbours are joined when one is freed, and
 * what is missing comes from the end of memory. Sizes are multiples of 16 and known to the caller, so
 * blocks in use carry no header.
 */

#define COVEY_GRAIN 16u
#define COVEY_PAGE 65536u

typedef struct covey_block {
    struct covey_block *next;
    uint32_t bytes;
} covey_block;

extern unsigned char __heap_base; /* set by the linker: the first byte after stack and data */

static covey_block *covey_free_list;
static uint32_t covey_heap_end; /* end of what the allocator has taken so far; 0: nothing yet */

/* The block size for a request, or 0 when it can't be had in 32 bits. */
static uint32_t covey_rounded(uint32_t bytes) {
    if (bytes > UINT32_MAX - COVEY_GRAIN) return 0;
    return bytes == 0 ? COVEY_GRAIN : (bytes + COVEY_GRAIN - 1) & ~(COVEY_GRAIN - 1);
}

/* `bytes` (a multiple of the grain) from the end of the heap, growing memory as needed; 0 if it won't. */
static uint32_t covey_extend(uint32_t bytes) {
    if (covey_heap_end == 0) {
        covey_heap_end = ((uint32_t)(uintptr_t)&__heap_base + COVEY_GRAIN - 1) & ~(COVEY_GRAIN - 1);
    }
    uint64_t end = (uint64_t)covey_heap_end + bytes;
    uint64_t have = (uint64_t)__builtin_wasm_memory_size(0) * COVEY_PAGE;
    if (end > UINT32_MAX) return 0;
    if (end > have) {
        uint32_t pages = (uint32_t)((end - have + COVEY_PAGE - 1) / COVEY_PAGE);
        if (__builtin_wasm_memory_grow(0, pages) == (size_t)-1) return 0;
    }
    uint32_t start = covey_heap_end;
    covey_heap_end = (uint32_t)end;
    return start;
}

void *covey_alloc(uint32_t bytes) {
    uint32_t wanted = covey_rounded(bytes);
    if (wanted == 0) return 0;
    for (covey_block **link = &covey_free_list; *link; link = &(*link)->next) {
        covey_block *block = *link;
        if (block->bytes < wanted) continue;
        if (block->bytes == wanted) {
            *link = block->next;
        } else {
            covey_block *rest = (covey_block *)((unsigned char *)block + wanted);
            rest->next = block->next;
            rest->bytes = block->bytes - wanted;
            *link = rest;
        }
        return block;
    }
    return (void *)(uintptr_t)covey_extend(wanted);
}

void covey_free(void *pointer, uint32_t bytes) {
    uint32_t size = covey_rounded(bytes);
    if (!pointer || size == 0) return;
    covey_block *block = pointer, *before = 0, *after = covey_free_list;
    while (after && (uintptr_t)after < (uintptr_t)block) {
        before = after;
        after = after->next;
    }
    block->bytes = size;
    block->next = after;
    if (after && (unsigned char *)block + size == (unsigned char *)after) {
        block->bytes += after->bytes;
        block->next = after->next;
    }
    if (!before) {
        covey_free_list = block;
    } else if ((unsigned char *)before + before->bytes == (unsigned char *)block) {
        before->bytes += block->bytes;
        before->next = block->next;
    } else {
        before->next = block;
    }
}

/* ---- Error texts --------------------------------------------------------------------------- */

static char covey_error_text[256];

const char *covey_error(void) { return covey_error_text; }

static uint32_t covey_append(uint32_t at, const char *text) {
    while (*text && at < sizeof covey_error_text - 1) covey_error_text[at++] = *text++;
    return at;
}

static uint32_t covey_append_number(uint32_t at, uint32_t value) {
    char digits[11];
    uint32_t i = sizeof digits - 1;
    digits[i] = 0;
    do {
        digits[--i] = (char)('0' + value % 10);
        value /= 10;
    } while (value);
    return covey_append(at, digits + i);
}

int32_t covey_fail(int32_t status, const char *format, ...) {
    va_list arguments;
    uint32_t at = 0;
    char one[2] = {0, 0};
    va_start(arguments, format);
    for (const char *c = format; *c; c++) {
        one[0] = *c;
        if (*c != '%' || !c[1]) {
            at = covey_append(at, one);
        } else if (*++c == 'u') {
            at = covey_append_number(at, va_arg(arguments, uint32_t));
        } else if (*c == 'd') {
            int32_t value = va_arg(arguments, int32_t);
            if (value < 0) at = covey_append(at, "-");
            at = covey_append_number(at, value < 0 ? 0u - (uint32_t)value : (uint32_t)value);
        } else if (*c == 's') {
            at = covey_append(at, va_arg(arguments, const char *));
        } else {
            one[0] = *c;
            at = covey_append(at, one);
        }
    }
    va_end(arguments);
    covey_error_text[at] = 0;
    return status;
}

#endif
