// SPDX-License-Identifier: BSD-3-Clause
#include "host/log.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string_view>

namespace liger {

bool logs_plans() {
  const char* const text = std::getenv("LIGER_LOG");
  if (text == nullptr) return false;
  std::string_view rest = text;
  while (true) {
    const size_t comma = rest.find(',');
    std::string_view topic = rest.substr(0, comma);
    while (topic.starts_with(' ')) topic.remove_prefix(1);
    while (topic.ends_with(' ')) topic.remove_suffix(1);
    if (topic == "plan") return true;
    if (comma == std::string_view::npos) return false;
    rest.remove_prefix(comma + 1);
  }
}

void log_plan(const std::string& plan) {
  static std::mutex mutex;
  static std::set<std::string> printed;
  const std::lock_guard lock(mutex);
  if (printed.insert(plan).second) std::fprintf(stderr, "liger: %s\n", plan.c_str());
}

}  // namespace liger
