#include "metal.h"

uint3 threadgroup_position_in_grid, threadgroups_per_grid, threads_per_threadgroup;

void launch(uint3 grid, uint3 block, std::function<void()> kernel) {
  threads_per_threadgroup = block;
  threadgroups_per_grid = {grid.x / block.x, grid.y / block.y, grid.z / block.z};
  for (unsigned y = 0; y < threadgroups_per_grid.y; y++)
    for (unsigned x = 0; x < threadgroups_per_grid.x; x++) {
      threadgroup_position_in_grid = {x, y, 0};
      group::run(int(block.x), kernel);
    }
}
