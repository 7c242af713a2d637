// Prints the instruction sets that the library would use on this machine, best first.
#include <cstdio>

#include "cavectl.h"

int main() {
  puts(cavectl_isas());
  return 0;
}
