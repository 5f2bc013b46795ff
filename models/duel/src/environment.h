/*
 * environment.h: two paddles and a ball between them, the learner's on the left, the opponent's on the right.
 * The opponent is a policy of the same shape whose weights are an auxiliary file: they are read and never
 * trained. Positions are in heights of the court: it is 1 high and 1.5 wide.
 */
#ifndef DUEL_ENVIRONMENT_H
#define DUEL_ENVIRONMENT_H

#include <stdint.h>

#define OBSERVATIONS 6
#define ACTIONS 3 /* 0 stays, 1 moves up (to greater heights), 2 moves down */
#define HIDDEN 64
#define STORED 24
#define POINTS 3 /* a game ends when one side has so many */
#define STEPS_MOST 1000
#define REWARD_MOST 1.0f
#define REWARD_SCALE 1.0f
#define SUCCESS_METRIC

/* Lengths in heights of the court, speeds in those per step. */
typedef struct {
    float across, height;   /* the ball; across is 0 at the learner's paddle, WIDTH at the opponent's */
    float rushing, rising;  /* its speed */
    float left, right;      /* the paddles' middles */
    uint32_t won, lost;     /* points */
    uint32_t serves, steps; /* so far */
    uint64_t key;
} environment;

/* Begins a game. */
void environment_reset(environment *it, uint64_t key);

/*
 * Both sides move at once, then the ball. The reward is 1 for a point won, -1 for one lost, else 0; the third
 * point of either side ends the game.
 */
float environment_step(environment *it, uint32_t action, uint32_t *end);

void environment_store(const environment *it, uint8_t *stored);

/* The ball's place and speed, the own paddle, the other one; each within -2 to 2. */
int environment_observe(const uint8_t *stored, float *observation);

/* COVEY_OK once the opponent is there. */
#define environment_ready opponent_ready
int32_t opponent_ready(void);

#endif
