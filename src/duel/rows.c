/* Rows of newcomers into their slots, one after the other, so that the last of several is what stays. */
#include <stdint.h>
#include <string.h>

/* size: slots of `target`. bytes: of a row. step: bytes from one row of `rows` to the next. Slot -1 is nowhere. Returns
 * how many slots there are not, which were left out. */
int64_t put_rows(char *restrict target, int64_t size, const char *restrict rows, const int64_t *restrict slots,
                 int64_t count, int64_t bytes, int64_t step)
{
    int64_t wrong = 0;
    for (int64_t b = 0; b < count; b++) {
        if (slots[b] >= 0 && slots[b] < size)
            memcpy(target + slots[b] * bytes, rows + b * step, (size_t)bytes);
        else
            wrong += slots[b] != -1;
    }
    return wrong;
}
