/* environment.c: the dynamics. Expressions keep Gymnasium's order of operations: f64 isn't associative. */
#include "environment.h"

#include "covey_episodes.h"
#include "covey_random.h"

#define GRAVITY 9.8
#define CART_MASS 1.0
#define POLE_MASS 0.1
#define TOTAL_MASS (POLE_MASS + CART_MASS)
#define LENGTH 0.5 /* half the pole's */
#define POLE_MASS_LENGTH (POLE_MASS * LENGTH)
#define FORCE 10.0
#define SECONDS 0.02 /* between steps */
#define POSITION_MOST 2.4
#define PI 3.14159265358979323846
#define ANGLE_MOST (12 * 2 * PI / 360)

/*
 * sin x and cos x for |x| <= 0.3: Taylor's series, whose first term left out is below 2^-60. No step begins
 * with a larger angle: an episode ends beyond 0.21.
 */
static double sine(double x) {
    double z = x * x;
    double p = 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return x + x * (z * p);
}

static double cosine(double x) {
    double z = x * x;
    double p = 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    /* 1 - z / 2 rounds; what it loses goes into the small term. */
    double half = 0.5 * z, near = 1.0 - half;
    return near + ((1.0 - near - half) + z * z * p);
}

static double uniform(uint64_t key, uint64_t index) {
    return -0.05 + 0.1 * ((double)(covey_random_bits(key, index) >> 11) * 0x1p-53);
}

void environment_reset(environment *it, uint64_t key) {
    *it = (environment){uniform(key, 0), uniform(key, 1), uniform(key, 2), uniform(key, 3)};
}

float environment_step(environment *it, uint32_t action, uint32_t *end) {
    double force = action == 1 ? FORCE : -FORCE;
    double cos_angle = cosine(it->angle), sin_angle = sine(it->angle);
    double push = (force + POLE_MASS_LENGTH * (it->turning * it->turning) * sin_angle) / TOTAL_MASS;
    double turning_rate = (GRAVITY * sin_angle - cos_angle * push) /
                          (LENGTH * (4.0 / 3.0 - POLE_MASS * (cos_angle * cos_angle) / TOTAL_MASS));
    double rate = push - POLE_MASS_LENGTH * turning_rate * cos_angle / TOTAL_MASS;
    it->position = it->position + SECONDS * it->speed;
    it->speed = it->speed + SECONDS * rate;
    it->angle = it->angle + SECONDS * it->turning;
    it->turning = it->turning + SECONDS * turning_rate;
    int out = it->position < -POSITION_MOST || it->position > POSITION_MOST || it->angle < -ANGLE_MOST ||
              it->angle > ANGLE_MOST;
    *end = out ? TERMINATED : RUNNING;
    return 1.0f;
}

void environment_store(const environment *it, uint8_t *stored) {
    float shown[OBSERVATIONS] = {(float)it->position, (float)it->speed, (float)it->angle, (float)it->turning};
    memcpy(stored, shown, sizeof shown);
}

int environment_observe(const uint8_t *stored, float *observation) {
    memcpy(observation, stored, STORED);
    for (int i = 0; i < OBSERVATIONS; i++) {
        if (!(observation[i] >= -1e6f && observation[i] <= 1e6f)) return 0;
    }
    return 1;
}
