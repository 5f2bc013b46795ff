/*
 * covey_random.h: random numbers as a function of (key, index). There is no state to carry along or to
 * lose: the index-th number is the same whoever asks for it, and in whichever order.
 *
 * The numbers of one key are the output of SplitMix64 started at that key: G. L. Steele, D. Lea,
 * C. H. Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the mixing function
 * of S. Vigna's reference code (splitmix64.c, 2015). Good for shuffles and initial weights; no secret
 * may depend on it.
 */
#ifndef COVEY_RANDOM_H
#define COVEY_RANDOM_H

#include <stdint.h>

#define COVEY_GOLDEN_GAMMA 0x9e3779b97f4a7c15ull

static inline uint64_t covey_mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* The key of one use (`stream`: initial weights, the shuffle of epoch 3, episode 17, ...) of a seed. */
static inline uint64_t covey_random_key(int64_t seed, uint64_t stream) {
    return covey_mix64(covey_mix64((uint64_t)seed + COVEY_GOLDEN_GAMMA) ^ (stream * COVEY_GOLDEN_GAMMA));
}

/* The index-th 64 random bits of a key: SplitMix64's index-th output, counted from 0. */
static inline uint64_t covey_random_bits(uint64_t key, uint64_t index) {
    return covey_mix64(key + (index + 1) * COVEY_GOLDEN_GAMMA);
}

/* Uniform in [0, 1), a multiple of 2^-24. */
static inline float covey_random_float(uint64_t key, uint64_t index) {
    return (float)(covey_random_bits(key, index) >> 40) * 0x1p-24f;
}

/* Uniform in [0, bound), bound >= 1: the high half of a product; biased by less than bound / 2^32. */
static inline uint32_t covey_random_below(uint64_t key, uint64_t index, uint32_t bound) {
    return (uint32_t)(((covey_random_bits(key, index) >> 32) * bound) >> 32);
}

#endif
