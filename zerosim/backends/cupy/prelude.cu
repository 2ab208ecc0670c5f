// The text that all kernels of GPUs begin with: formats move in and out, and every operation is rounded.
//
// Nothing here needs a header, so that any compiler of CUDA takes it; `__fadd_rn` and its like are never contracted into
// fused multiply-adds, and the numbers are rounded to nearest even, subnormals included. A NaN stays a NaN; which of its
// codes it has is not promised. The casts are instructions of the GPU; for one that has none, and for a CPU's compiler,
// zerosim.backends.cupy.tracing adds a line ZS_BF16(...) or ZS_FORMAT(...), which are numerics/rounding.py's formulas.

typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
#define ZS __device__ __forceinline__
template <typename T, int n> struct alignas(n * sizeof(T)) Group { T at[n]; };
ZS u32 zs_word(float x) { return __float_as_uint(x); }
ZS float zs_value(u32 word) { return __uint_as_float(word); }
ZS u32 zs_larger(u32 a, u32 b) { return a > b ? a : b; }

#define ZS_OPERATIONS(type, d, f) \
ZS type zs_add(type a, type b) { return __##d##add_rn(a, b); } \
ZS type zs_subtract(type a, type b) { return __##d##add_rn(a, -b); } \
ZS type zs_multiply(type a, type b) { return __##d##mul_rn(a, b); } \
ZS type zs_divide(type a, type b) { return __##d##div_rn(a, b); } \
ZS type zs_sqrt(type a) { return __##d##sqrt_rn(a); } \
ZS type zs_exp(type a) { return exp##f(a); } \
ZS type zs_log(type a) { return log##f(a); } \
ZS type zs_tanh(type a) { return tanh##f(a); } \
ZS type zs_absolute(type a) { return fabs##f(a); }
ZS_OPERATIONS(float, f, f)
ZS_OPERATIONS(double, d, )

template <typename T> ZS T zs_add(T a, T b) { return (T)(a + b); }
template <typename T> ZS T zs_square(T a) { return zs_multiply(a, a); }
template <typename T> ZS T zs_negative(T a) { return -a; }
template <typename T> ZS T zs_sign(T a) { return a > 0 ? (T)1 : a < 0 ? (T)-1 : a == 0 ? (T)0 : a; }
template <typename T> ZS T zs_maximum(T a, T b)  // NaN if either is; of +0 and -0 the positive
{ return a != a ? a : b != b ? b : a > b ? a : b > a ? b : a == 0 ? zs_add(a, b) : a; }
template <typename T> ZS T zs_minimum(T a, T b)  // NaN if either is; of +0 and -0 the negative
{ return a != a ? a : b != b ? b : a < b ? a : b < a ? b : a == 0 ? (T)-zs_add((T)-a, (T)-b) : a; }
#if __CUDA_ARCH__ >= 800  // the same in one instruction (PTX ISA, "max")
#define ZS_EXTREMUM(name, instruction) ZS float name(float a, float b) { \
  float found; asm(instruction ".NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b)); return found; }
ZS_EXTREMUM(zs_maximum, "max")
ZS_EXTREMUM(zs_minimum, "min")
#endif
// From float64, rounded to an odd last bit: a second rounding, to fewer bits, is then as good as the only one.
ZS float zs_odd(double x) {
  float f = __double2float_rz(x);
  return (double)f == x || x != x ? f : zs_value(zs_word(f) | 1u);
}
ZS float zs_widen_fp32(float x) { return x; }
ZS float zs_narrow_fp32(float x) { return x; }

// Casts by instructions, which round as the formulas do (PTX ISA, "cvt"; `zerosim gpu-check` compares them for every
// float32): a formula's dozen whole-number operations for each element would take longer than its bytes.
#if __CUDA_ARCH__ >= 800
ZS float zs_widen_bf16(u16 code) { return zs_value((u32)code << 16); }
ZS u16 zs_narrow_bf16(float x) { u16 code; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(code) : "f"(x)); return code; }
#endif
#ifdef __CUDA_ARCH__
ZS float zs_widen_fp16(u16 code) {
  float value; asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(code)); return value; }
ZS u16 zs_narrow_fp16(float x) { u16 code; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(x)); return code; }
#endif
#if __CUDA_ARCH__ >= 890
ZS float zs_widen_fp8_e5m2(u8 code) { return zs_widen_fp16((u16)(code << 8)); }
ZS float zs_widen_fp8_e4m3(u8 code) {
  u32 two; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"((u16)code)); return zs_widen_fp16((u16)two); }
// The instruction stops at the largest number. What rounds beyond it (`overflow_from` of numerics/formats.py; a tie is
// rounded to the even code, which e4m3 has and e5m2 has not) is infinite, or NaN in a format without infinity.
#define ZS_NARROW_FP8(kind, beyond, largest) \
ZS u8 zs_narrow_fp8_##kind(float x) { \
  u16 two; asm("cvt.rn.satfinite." #kind "x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x)); \
  return (u8)(fabsf(x) beyond ? (two & 0x80u) | largest : two); \
}
ZS_NARROW_FP8(e4m3, > 464.0f, 0x7fu)
ZS_NARROW_FP8(e5m2, >= 61440.0f, 0x7cu)
#endif

// Two neighboring numbers of fp8, whose codes are one u16, computed with at once: in fp16, whose 11 significant
// bits are more than 2·4 + 2, for fp8's 4 or 3, so that what is rounded to fp8 next has the bits of one rounding
// (S. Figueroa, "When is double rounding innocuous?", 1995). In float32 the sum of eight takes longer than their bytes.
#if __CUDA_ARCH__ >= 890
struct Half2 { u32 both; };
#define ZS_HALF2(name, instruction) ZS Half2 name(Half2 a, Half2 b) { \
  Half2 found; asm(instruction ".f16x2 %0, %1, %2;" : "=r"(found.both) : "r"(a.both), "r"(b.both)); return found; }
ZS_HALF2(zs_add, "add.rn")
ZS_HALF2(zs_maximum, "max.NaN")
ZS_HALF2(zs_minimum, "min.NaN")
#define ZS_HALF2_CASTS(kind) \
ZS Half2 zs_widen2_fp8_##kind(u16 codes) { \
  Half2 x; asm("cvt.rn.f16x2." #kind "x2 %0, %1;" : "=r"(x.both) : "h"(codes)); return x; } \
ZS u16 zs_saturated2_##kind(u32 both) { \
  u16 codes; asm("cvt.rn.satfinite." #kind "x2.f16x2 %0, %1;" : "=h"(codes) : "r"(both)); return codes; }
ZS_HALF2_CASTS(e4m3)
ZS_HALF2_CASTS(e5m2)
#define ZS_BEYOND2(type, x, bound) /* |x| > bound, for each of the two */ \
  u32 beyond; asm("{ .reg .b32 size; abs.f16x2 size, %1; set.gt." type ".f16x2 %0, size, %2; }" \
                  : "=r"(beyond) : "r"(x.both), "r"(bound));
ZS u16 zs_narrow2_fp8_e4m3(Half2 x) {
  ZS_BEYOND2("u32", x, 0x5f405f40u)  // 464; all bits of fp16 are a NaN's
  return zs_saturated2_e4m3(x.both | beyond);
}
ZS Half2 zs_round2_fp8_e4m3(Half2 x) { return zs_widen2_fp8_e4m3(zs_narrow2_fp8_e4m3(x)); }
ZS Half2 zs_round2_fp8_e5m2(Half2 x) {
  ZS_BEYOND2("f16x2", x, 0x7b7f7b7fu)  // 61408, the last before 61440; 1 or 0, and twice the largest is infinite
  Half2 y = zs_widen2_fp8_e5m2(zs_saturated2_e5m2(x.both));
  asm("fma.rn.f16x2 %0, %0, %1, %0;" : "+r"(y.both) : "r"(beyond));
  return y;
}
ZS u16 zs_narrow2_fp8_e5m2(Half2 x) { return (u16)__byte_perm(zs_round2_fp8_e5m2(x).both, 0, 0x31); }  // upper bytes
#else  // by formulas, in float32
struct Half2 { float first, second; };
#define ZS_HALF2(name) ZS Half2 name(Half2 a, Half2 b) { return {name(a.first, b.first), name(a.second, b.second)}; }
ZS_HALF2(zs_add)
ZS_HALF2(zs_maximum)
ZS_HALF2(zs_minimum)
#define ZS_HALF2_CASTS(name) \
ZS float zs_widen_##name(u8 code); \
ZS u8 zs_narrow_##name(float x); \
ZS Half2 zs_widen2_##name(u16 codes) { return {zs_widen_##name((u8)codes), zs_widen_##name((u8)(codes >> 8))}; } \
ZS u16 zs_narrow2_##name(Half2 x) { return (u16)(zs_narrow_##name(x.first) | zs_narrow_##name(x.second) << 8); } \
ZS Half2 zs_round2_##name(Half2 x) { return zs_widen2_##name(zs_narrow2_##name(x)); }
ZS_HALF2_CASTS(fp8_e4m3)
ZS_HALF2_CASTS(fp8_e5m2)
#endif

// The two casts of bf16 by formulas: the upper half of a float32.
#define ZS_BF16(name) \
ZS float zs_widen_##name(u16 code) { return zs_value((u32)code << 16); } \
ZS u16 zs_narrow_##name(float x) { \
  u32 word = zs_word(x); \
  u32 code = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16; \
  return (u16)((word & 0x7fffffffu) > 0x7f800000u ? ((word >> 16) & 0x8000u) | 0x7fc0u : code); \
}
// The two casts by formulas of a format of fewer exponent bits than float32.
#define ZS_FORMAT(name, code_type, all, sign_bit, sign_up, up, scale, largest, special_bits, nan, beyond, overflow, \
                  smallest_normal, lift, bias) \
ZS float zs_widen_##name(code_type code) { \
  u32 magnitude = ((u32)code & all) << up; \
  float value = __fmul_rn(zs_value(magnitude), scale); \
  if (((u32)code & all) >= largest) value = zs_value(magnitude | special_bits); \
  return zs_value(zs_word(value) | ((u32)code & sign_bit) << sign_up); \
} \
ZS code_type zs_narrow_##name(float x) { \
  u32 word = zs_word(x), magnitude = word & 0x7fffffffu, sign = (word >> sign_up) & sign_bit; \
  if (magnitude > 0x7f800000u) return (code_type)(sign | nan); \
  if (magnitude beyond overflow) return (code_type)(sign | largest); \
  u32 c = zs_larger(magnitude & 0x7f800000u, smallest_normal) + lift; \
  u32 sum = zs_word(__fadd_rn(zs_value(magnitude), zs_value(c))); \
  return (code_type)(((sum + (sum >> up) - bias) & all) | sign); \
}

// What a spread array x has for element first + j of a group of `each` elements, at most q: x has one element for every
// q (zs_every), or q that come again in a cycle (zs_cycle). The compiler divides and loads once for the group.
template <typename T, typename Index> ZS T zs_every(const T* x, Index first, Index q, int j, int each) {
  Index period = first / q, within = first - period * q;
  T here = x[period], next = x[period + (within + each > q)];
  return within + j < q ? here : next;
}
template <typename T, typename Index> ZS T zs_cycle(const T* x, Index first, Index q, int j) {
  Index at = first % q + j;
  return x[at < q ? at : at - q];
}

// Eight neighboring elements for each thread, from `first` on. Where `aligned`, all arrays of which eight are taken
// begin at a multiple of eight elements, and an access is of all eight. Beyond the end 0 is read, and nothing written.
#define ZS_EIGHT u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; if (first >= n) return;
template <typename T> ZS Group<T, 8> zs_take_eight(const T* x, u64 first, u64 n, int aligned) {
  if (aligned && n - first >= 8) return *reinterpret_cast<const Group<T, 8>*>(x + first);
  Group<T, 8> taken;
  for (int j = 0; j < 8; ++j) taken.at[j] = first + j < n ? x[first + j] : (T)0;
  return taken;
}
template <typename T> ZS void zs_put_eight(const Group<T, 8>& made, T* out, u64 first, u64 n, int aligned) {
  if (aligned && n - first >= 8) *reinterpret_cast<Group<T, 8>*>(out + first) = made;
  else for (int j = 0; j < 8 && first + j < n; ++j) out[first + j] = made.at[j];
}

// The body of a kernel that folds n·line elements: every `line` of them are taken as rows of `step`, and each thread
// adds up a column of these: neighboring threads read neighboring elements, whatever the shape. It loads eight at a
// time, and no load waits for a branch: beyond the end it loads the first of the eight again.
#define ZS_FOLD(addend, join, begin) \
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x; \
  if (thread >= n) return; \
  u64 first = thread / step * line, stop = first + line; \
  Work sum = begin; \
  for (u64 at = first + thread % step; at < stop; at += 8 * step) { \
    Work addends[8]; \
    _Pragma("unroll") \
    for (int j = 0; j < 8; ++j) { \
      u64 i = at + j * step < stop ? at + j * step : at; \
      addends[j] = addend; \
    } \
    _Pragma("unroll") \
    for (int j = 0; j < 8; ++j) sum = at + j * step < stop ? join(sum, addends[j]) : sum; \
  } \
  out[thread] = narrow(sum);
