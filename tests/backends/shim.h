extern "C" {  // declared here: <math.h> in C++ takes three times as long to read as a kernel to compile
void* memcpy(void*, const void*, decltype(sizeof 0));
float fabsf(float), sqrtf(float), nextafterf(float, float);
double fabs(double), sqrt(double), fmin(double, double), fmax(double, double), ldexp(double, int);
int ilogb(double);
}
#define __device__ static
#define __global__
#define __forceinline__ inline
struct Place { unsigned x; };
static Place blockIdx, blockDim, threadIdx;
static float __uint_as_float(unsigned w) { float f; memcpy(&f, &w, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned w; memcpy(&w, &f, 4); return w; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __ddiv_rn(double a, double b) { return a / b; }
static double __dsqrt_rn(double a) { return sqrt(a); }
static float __double2float_rz(double x) {
  float f = (float)x;
  return fabs((double)f) > fabs(x) ? nextafterf(f, 0.0f) : f;
}
static void atomicAdd(unsigned* p, unsigned x) { *p += x; }
extern "C" {
double (*shim_function)(int, int, double);
}
#define expf(x) ((float)shim_function(0, 0, (double)(x)))
#define logf(x) ((float)shim_function(1, 0, (double)(x)))
#define tanhf(x) ((float)shim_function(2, 0, (double)(x)))
#define exp(x) shim_function(0, 1, (x))
#define log(x) shim_function(1, 1, (x))
#define tanh(x) shim_function(2, 1, (x))
