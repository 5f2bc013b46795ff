/* environment.c: the rules. */
#include "environment.h"

#include "covey_episodes.h"
#include "covey_random.h"

_Static_assert(sizeof(environment) == STORED, "the record keeps the environment as it is");

void environment_reset(environment *it, uint64_t key) {
    uint32_t wall = 2 + covey_random_below(key, 0, SIDE - 4);
    *it = (environment){0};
    it->wall_column = (uint8_t)wall;
    it->door_row = (uint8_t)covey_random_below(key, 1, SIDE);
    it->goal_column = (uint8_t)(wall + 1 + covey_random_below(key, 2, SIDE - 1 - wall));
    it->goal_row = (uint8_t)covey_random_below(key, 3, SIDE);
    /* The agent and the key: two different cells of the left room. */
    uint32_t cells = wall * SIDE, place = covey_random_below(key, 4, cells);
    uint32_t other = covey_random_below(key, 5, cells - 1);
    other += other >= place;
    it->column = (uint8_t)(place % wall);
    it->row = (uint8_t)(place / wall);
    it->key_column = (uint8_t)(other % wall);
    it->key_row = (uint8_t)(other / wall);
}

/* Where a step in a direction leads, modulo 256 beyond a border. */
static void ahead(const environment *it, uint32_t action, uint8_t *column, uint8_t *row) {
    static const int8_t right[ACTIONS] = {0, 1, 0, -1}, down[ACTIONS] = {-1, 0, 1, 0};
    *column = (uint8_t)(it->column + right[action]);
    *row = (uint8_t)(it->row + down[action]);
}

static int blocked(const environment *it, uint8_t column, uint8_t row) {
    if (column >= SIDE || row >= SIDE) return 1;
    return column == it->wall_column && (row != it->door_row || !(it->open || it->has_key));
}

float environment_step(environment *it, uint32_t action, uint32_t *end) {
    uint8_t column, row;
    ahead(it, action, &column, &row);
    it->steps++;
    if (!blocked(it, column, row)) {
        it->column = column;
        it->row = row;
    }
    if (it->column == it->key_column && it->row == it->key_row) it->has_key = 1;
    if (it->column == it->wall_column) it->open = 1;
    if (it->column != it->goal_column || it->row != it->goal_row) return 0.0f;
    *end = TERMINATED;
    return 1.0f - 0.9f * (float)it->steps / (float)STEPS_MOST;
}

void environment_store(const environment *it, uint8_t *stored) { memcpy(stored, it, sizeof *it); }

/* What a game can lead to, or nearly: nothing that the arithmetic below couldn't take. */
static int valid(const environment *it) {
    return it->column < SIDE && it->row < SIDE && it->wall_column >= 2 && it->wall_column < SIDE - 2 &&
           it->door_row < SIDE && it->key_column < it->wall_column && it->key_row < SIDE &&
           it->goal_column > it->wall_column && it->goal_column < SIDE && it->goal_row < SIDE &&
           it->has_key <= 1 && it->open <= it->has_key && it->steps <= STEPS_MOST && it->nothing == 0 &&
           (it->column < it->wall_column || it->open) &&
           (it->column != it->wall_column || it->row == it->door_row);
}

static float apart(uint8_t to, uint8_t from) { return ((float)to - (float)from) * (1.0f / (SIDE - 1)); }

int environment_observe(const uint8_t *stored, float *observation) {
    environment it;
    memcpy(&it, stored, sizeof it);
    if (!valid(&it)) return 0;
    observation[0] = 2.0f * apart(it.column, 0) - 1.0f;
    observation[1] = 2.0f * apart(it.row, 0) - 1.0f;
    observation[2] = it.has_key ? 0.0f : apart(it.key_column, it.column);
    observation[3] = it.has_key ? 0.0f : apart(it.key_row, it.row);
    observation[4] = it.has_key;
    observation[5] = apart(it.wall_column, it.column);
    observation[6] = apart(it.door_row, it.row);
    observation[7] = it.open;
    observation[8] = apart(it.goal_column, it.column);
    observation[9] = apart(it.goal_row, it.row);
    observation[10] = it.column > it.wall_column ? 1.0f : it.column == it.wall_column ? 0.0f : -1.0f;
    for (uint32_t action = 0; action < ACTIONS; action++) {
        uint8_t column, row;
        ahead(&it, action, &column, &row);
        observation[11 + action] = blocked(&it, column, row);
    }
    return 1;
}

static int32_t steps_between(uint8_t column, uint8_t row, uint8_t to_column, uint8_t to_row) {
    int32_t right = (int32_t)to_column - column, down = (int32_t)to_row - row;
    return (right < 0 ? -right : right) + (down < 0 ? -down : down);
}

float environment_potential(const uint8_t *stored) {
    environment it;
    memcpy(&it, stored, sizeof it);
    uint8_t column = it.column, row = it.row;
    int32_t way = 0;
    if (!it.has_key) {
        way += steps_between(column, row, it.key_column, it.key_row);
        column = it.key_column;
        row = it.key_row;
    }
    if (column < it.wall_column) {
        way += steps_between(column, row, it.wall_column, it.door_row);
        column = it.wall_column;
        row = it.door_row;
    }
    way += steps_between(column, row, it.goal_column, it.goal_row);
    return -(float)way / (2.0f * SIDE);
}
