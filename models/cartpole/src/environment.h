/*
 * environment.h: a pole on a cart, pushed left or right at each step. The dynamics are, step for step, those
 * of CartPole-v1 in Gymnasium (Farama Foundation), in f64 as there, after A. G. Barto, R. S. Sutton,
 * C. W. Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems" (1983).
 */
#ifndef CARTPOLE_ENVIRONMENT_H
#define CARTPOLE_ENVIRONMENT_H

#include <stdint.h>

#define OBSERVATIONS 4 /* position, its speed, angle, its speed: as f32, as Gymnasium shows them */
#define ACTIONS 2      /* 0 pushes to the left, 1 to the right */
#define HIDDEN 32
#define STORED 16
#define STEPS_MOST 500
#define REWARD_MOST 1.0f /* each step's */
#define REWARD_SCALE 0.05f

typedef struct {
    double position, speed, angle, turning;
} environment;

/* Each of the four is uniform in [-0.05, 0.05). */
void environment_reset(environment *it, uint64_t key);

/* Returns the reward, 1; sets *end to TERMINATED once the cart or the pole is out of bounds. */
float environment_step(environment *it, uint32_t action, uint32_t *end);

void environment_store(const environment *it, uint8_t *stored);
int environment_observe(const uint8_t *stored, float *observation);

#endif
