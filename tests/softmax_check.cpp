// Checks the index arithmetic of csrc/softmax.h at sizes that no test can hold: prints what is wrong, and exits with 1.
#include "../csrc/softmax.h"

#include <cstdio>

using namespace memkern;

namespace {

bool failed = false;

void check(const char* name, int64_t found, int64_t expected) {
  if (found == expected) return;
  failed = true;
  std::printf("%s: got %lld, expected %lld\n", name, static_cast<long long>(found), static_cast<long long>(expected));
}

void check_divisor() {
  const int64_t top = (int64_t{1} << 62) - 1;
  int64_t divisors[200] = {1, 2, 3, 5, 7, 10, 641, 65'535, 65'537, 1'000'003};
  int count = 10;
  for (int bits = 4; bits < 62; ++bits)
    for (int64_t off = -1; off <= 1; ++off) divisors[count++] = (int64_t{1} << bits) + off;
  for (int d = 0; d < count; ++d) {
    const int64_t by = divisors[d];
    const Divisor divide(by);
    const auto check_at = [&](int64_t n) {
      if (n < 0 || n > top) return;
      int64_t rest = -1;
      check("quotient", divide(n, rest), n / by);
      check("rest", rest, n % by);
    };
    for (int64_t near = 0; near <= 2; ++near) {
      check_at(near), check_at(top - near);
      for (int bits = 1; bits < 62; ++bits) {
        const int64_t multiple = (int64_t{1} << bits) / by * by;
        check_at((int64_t{1} << bits) - near), check_at(multiple - near), check_at(multiple + near);
        check_at(top / by * by - near), check_at(by * near - 1), check_at(by * near);
      }
    }
  }
}

void check_live() {
  for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{3, 5}, {5, 3}, {1, 7}, {100'000, 70'000}}) {
    SoftmaxShape shape;
    shape.n = keys;
    check("live", shape.live(12), keys);
    shape.causal = true;
    shape.queries = Divisor(queries);
    for (const int64_t matrix : {int64_t{0}, int64_t{1}, int64_t{1} << 33}) {
      for (const int64_t query : {int64_t{0}, queries / 2, queries - 1}) {
        const int64_t keys_seen = query + 1 + keys - queries;
        check("live, causal", shape.live(matrix * queries + query), std::max<int64_t>(keys_seen, 0));
      }
    }
  }
}

// A mask (batch, 1, queries, keys) of x (batch, heads, queries, keys), and one that is wide in memory.
void check_start() {
  const int64_t batch = 70'000, heads = 50'000, queries = 3, keys = 1 << 20;
  MaskRows mask;
  mask.dims = 3;
  const int64_t sizes[] = {queries, heads, batch}, strides[] = {keys, 0, queries * keys};
  for (int d = 0; d < 3; ++d) mask.size[d] = Divisor(sizes[d]), mask.stride[d] = strides[d];
  for (const int64_t b : {int64_t{0}, int64_t{50'000}, batch - 1})
    for (const int64_t h : {int64_t{0}, heads - 1})
      for (int64_t q = 0; q < queries; ++q)
        check("start", mask.start((b * heads + h) * queries + q), b * queries * keys + q * keys);
}

}  // namespace

int main() {
  check_divisor();
  check_live();
  check_start();
  return failed;
}
