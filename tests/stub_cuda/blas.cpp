// What torch asks of cuBLAS around a matrix product; the products themselves do nothing.
#include <cstdlib>
#include <cstring>

extern "C" {

int cublasCreate_v2(void** handle) { return *handle = std::malloc(64), 0; }
int cublasLtCreate(void** handle) { return *handle = std::malloc(64), 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
int cublasLtMatmulDescCreate(void** made, int, int) { return *made = std::malloc(64), 0; }
int cublasLtMatrixLayoutCreate(void** made) { return *made = std::malloc(64), 0; }
int cublasLtMatmulPreferenceCreate(void** made) { return *made = std::malloc(64), 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                   void* results, int* found) {
  std::memset(results, 0, 8);
  return *found = 1, 0;
}

}
