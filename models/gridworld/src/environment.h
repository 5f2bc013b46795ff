/*
 * environment.h: two rooms, a wall between them, a locked door in it. The agent walks to the key, through the
 * door, to the goal. Nothing is rewarded but the goal. Rooms, key, door and goal differ from unit to unit.
 */
#ifndef GRIDWORLD_ENVIRONMENT_H
#define GRIDWORLD_ENVIRONMENT_H

#include <stdint.h>

#define SIDE 8 /* cells of a row and of a column */
#define OBSERVATIONS 15
#define ACTIONS 4 /* 0 up, 1 right, 2 down, 3 left */
#define HIDDEN 64
#define STORED 12
#define STEPS_MOST 100
#define REWARD_MOST 1.0f
#define REWARD_SCALE 1.0f
#define SUCCESS_METRIC
#define SHAPING_HYPERPARAMETER

/* All of it, as the record keeps it: columns and rows count from 0 at the top left. */
typedef struct {
    uint8_t column, row;           /* the agent */
    uint8_t key_column, key_row;   /* left of the wall */
    uint8_t wall_column, door_row; /* the wall fills its column but for the door */
    uint8_t goal_column, goal_row; /* right of the wall */
    uint8_t has_key, open;         /* 0 or 1; an open door means that the key was there */
    uint8_t steps, nothing;        /* taken so far; 0 */
} environment;

void environment_reset(environment *it, uint64_t key);

/*
 * A step into a border, the wall or the locked door goes nowhere. Stepping on the key takes it, stepping into
 * the door with the key opens it and enters. The goal ends the episode with the reward
 * 1 - 0.9 * steps / STEPS_MOST; every other step has 0.
 */
float environment_step(environment *it, uint32_t action, uint32_t *end);

void environment_store(const environment *it, uint8_t *stored);

/*
 * The agent's place, what is where as seen from it, what it has done, which ways are blocked; all within -1
 * to 1. How much time is left is not shown.
 */
int environment_observe(const uint8_t *stored, float *observation);

/* Minus the steps that the shortest way still needs, over 2 * SIDE. */
float environment_potential(const uint8_t *stored);

#endif
