/*
 * covey_math.h: the few functions of <math.h> that training needs, in plain f32 arithmetic, so that
 * every host computes the same bits. Accuracy over the whole range: within 2 units in the last place.
 * Reductions and polynomials are those of expf and logf in the Cephes mathematical library
 * (S. L. Moshier, release 2.2, single precision).
 */
#ifndef COVEY_MATH_H
#define COVEY_MATH_H

#include <stdint.h>

static inline float covey_float_from_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t covey_bits_from_float(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* One WebAssembly instruction each, exactly rounded. */
static inline float covey_sqrtf(float x) { return __builtin_sqrtf(x); }
static inline float covey_floorf(float x) { return __builtin_floorf(x); }
static inline float covey_fabsf(float x) { return __builtin_fabsf(x); }

/* e^x. 0 below -87.33 (no denormal results), infinity above 88.72; NaN stays NaN. */
static inline float covey_expf(float x) {
    if (x != x) return x;
    if (x > 88.72283f) return __builtin_inff();
    if (x < -87.33654f) return 0.0f;
    /* x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts so that r is exact to the last bit or so. */
    float n = __builtin_rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    /* n is 128 at the very top of the range, where 2^n itself isn't a float: scale in two steps. */
    int32_t power = (int32_t)n, half = power / 2;
    p *= covey_float_from_bits((uint32_t)(half + 127) << 23);
    return p * covey_float_from_bits((uint32_t)(power - half + 127) << 23);
}

/* ln x. -infinity at 0, NaN below it; denormals included; infinity and NaN stay as they are. */
static inline float covey_logf(float x) {
    if (x != x || x == __builtin_inff()) return x;
    if (x < 0.0f) return __builtin_nanf("");
    if (x == 0.0f) return -__builtin_inff();
    int32_t exponent = 0;
    if (x < 1.17549435e-38f) {
        x *= 16777216.0f; /* 2^24: makes a denormal normal */
        exponent = -24;
    }
    /* x = m 2^e with sqrt(1/2) <= m < sqrt(2). */
    uint32_t bits = covey_bits_from_float(x);
    exponent += (int32_t)(bits >> 23) - 126;
    float m = covey_float_from_bits((bits & 0x007fffffu) | 0x3f000000u);
    if (m < 0.707106781186547524f) {
        exponent -= 1;
        m = m + m - 1.0f;
    } else {
        m = m - 1.0f;
    }
    float z = m * m, e = (float)exponent;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    float y = m * z * p;
    y += e * -2.12194440e-4f;
    y -= 0.5f * z;
    return m + y + e * 0.693359375f;
}

#endif
