#include "cc/dispatch/tiles_sm90.h"

namespace grouped {

// One warpgroup stores while the other multiplies. A single slot makes the store slow, which does not matter once the
// other's main loop is longer: measured, the fifth stage gains 1 to 2 % from K = 1024 on and loses 2 % at 768.
// Four-byte results store twice as long and keep their slots.
const TileChoice& rows_tile_sm90(int64_t contracted, int64_t out_bytes) {
  constexpr int64_t kHidesStore = 1024;  // contracted elements
  return out_bytes == 2 && contracted >= kHidesStore ? kManyStages : kManySlots;
}

}  // namespace grouped
