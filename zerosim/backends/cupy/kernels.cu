// Kernels of one GPU that no function of elements says: zerosim.backends.cupy.kernels launches each by its name.
//
// Rest is the type of what is read, To of what is written, Work of what is computed; wide(x) and narrow(x) go between.
// HEIGHT is the number of rows in a block.

extern "C" __global__ void zs_relu(const Rest* x, To* out, u8* bits, u64 n, int aligned) {
  ZS_EIGHT
  Group<Rest, 8> taken = zs_take_eight(x, first, n, aligned);
  Group<To, 8> made;
  u32 packed = 0;
  for (int j = 0; j < 8; ++j) {
    made.at[j] = narrow(zs_maximum(wide(taken.at[j]), (Work)0));
    packed = packed << 1 | (made.at[j] != 0 ? 1u : 0u);
  }
  bits[first / 8] = (u8)packed;
  zs_put_eight(made, out, first, n, aligned);
}

extern "C" __global__ void zs_select(const u8* bits, const Rest* x, Rest* out, u64 n, int aligned) {
  ZS_EIGHT
  Group<Rest, 8> taken = zs_take_eight(x, first, n, aligned);
  u32 through = bits[first / 8];
  for (int j = 0; j < 8; ++j) taken.at[j] = through >> (7 - j) & 1 ? taken.at[j] : (Rest)0;
  zs_put_eight(taken, out, first, n, aligned);
}

extern "C" __global__ void zs_drop(const Rest* x, const u32* drawn, To* out, u64 threshold, Work factor, u64 n,
                                   int aligned) {
  ZS_EIGHT
  Group<Rest, 8> taken = zs_take_eight(x, first, n, aligned);
  Group<u32, 8> words = zs_take_eight(drawn, first, n, aligned);
  Group<To, 8> made;
  for (int j = 0; j < 8; ++j)
    made.at[j] = narrow(words.at[j] >= threshold ? zs_multiply(wide(taken.at[j]), factor) : (Work)0);
  zs_put_eight(made, out, first, n, aligned);
}

extern "C" __global__ void zs_codes_from(const Rest* x, u32* found, u64 mask, u64 low, u64 n, int aligned) {
  ZS_EIGHT
  Group<Rest, 8> taken = zs_take_eight(x, first, n, aligned);
  u32 count = 0;
  for (int j = 0; j < 8; ++j) count += ((u64)taken.at[j] & mask) >= low ? 1u : 0u;  // a 0 beyond the end is below `low`
  if (count) atomicAdd(found, count);
}

// A thread adds up one column of a block of sorted rows. The first and the last class of a block may go on beside it:
// their sums are two of the rows that are added next; where they are one class the second is -0, which adds nothing.
extern "C" __global__ void zs_add_rows(const Rest* __restrict__ x, const long long* __restrict__ order,
                                       const long long* __restrict__ classes, Work* __restrict__ parts,
                                       long long* __restrict__ classes_of_parts, To* __restrict__ out,
                                       u64 rows, u64 columns, u64 n) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u64 block = i / columns, column = i % columns, first = block * HEIGHT, begin = first;
  u64 stop = first + HEIGHT < rows ? first + HEIGHT : rows;
  Work sum = 0;
  for (u64 eight = first; eight < stop; eight += 8) {
    Work addends[8];
    #pragma unroll
    for (int j = 0; j < 8; ++j)
      addends[j] = wide(x[order[eight + j < stop ? eight + j : eight] * columns + column]);
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      u64 at = eight + j;
      if (at >= stop) break;
      sum = at == begin ? addends[j] : zs_add(sum, addends[j]);
      if (at + 1 < stop && classes[at + 1] == classes[at]) continue;
      if (rows <= HEIGHT || (begin > first && at + 1 < stop)) out[classes[at] * columns + column] = narrow(sum);
      else parts[(2 * block + (begin > first)) * columns + column] = sum;
      begin = at + 1;
    }
  }
  if (rows <= HEIGHT) return;
  if (classes[first] == classes[stop - 1]) parts[(2 * block + 1) * columns + column] = (Work)-0.0f;
  if (column) return;
  classes_of_parts[2 * block] = classes[first];
  classes_of_parts[2 * block + 1] = classes[stop - 1];
}

extern "C" __global__ void zs_pick(const Work* shifted, const Target* targets, Work* picked, u64 columns, u64 n) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) picked[i] = (long long)targets[i] < 0 ? (Work)0 : shifted[i * columns + targets[i]];
}

extern "C" __global__ void zs_loss_gradient(const Rest* x, const Target* targets, const Sums* log_sums,
                                            To* out, Work factor, u64 columns, u64 n, int aligned) {
  ZS_EIGHT
  Group<Rest, 8> taken = zs_take_eight(x, first, n, aligned);
  Group<To, 8> made;
  u64 row = first / columns, column = first - row * columns;
  for (int j = 0; j < 8 && first + j < n; ++j) {
    long long target = (long long)targets[row];
    Work p = zs_exp(zs_subtract(wide(taken.at[j]), (Work)log_sums[row]));
    if (target == (long long)column) p = zs_subtract(p, (Work)1);
    made.at[j] = narrow(target < 0 ? (Work)0 : zs_multiply(p, factor));
    if (++column == columns) { column = 0; ++row; }
  }
  zs_put_eight(made, out, first, n, aligned);
}
