// What the drivers share: their options, how they fail, and all PEs at work as threads of one process.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace driver {

constexpr int kBadOption = 2;

[[noreturn]] inline void fail(int status, const char* format, ...) {
  static std::mutex mutex;
  mutex.lock();  // never released: the first failure is the one that is told
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::fflush(stderr);
  std::_Exit(status);
}

// --name=value; a name that has no default is none.
class Options {
 public:
  explicit Options(std::map<std::string, std::string> defaults) : values_(std::move(defaults)) {}

  void parse(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      const size_t equals = argument.find('=');
      const std::string name = argument.substr(0, equals);
      if (equals == std::string::npos || values_.find(name) == values_.end()) {
        fail(kBadOption, "unknown option %s", argument.c_str());
      }
      values_[name] = argument.substr(equals + 1);
    }
  }

  const std::string& text(const std::string& name) const { return values_.at(name); }
  int64_t number(const std::string& name) const { return std::stoll(values_.at(name)); }

  std::vector<int64_t> list(const std::string& name) const {
    std::vector<int64_t> numbers;
    const std::string& value = values_.at(name);
    for (size_t begin = 0; begin < value.size();) {
      const size_t end = std::min(value.find(',', begin), value.size());
      numbers.push_back(std::stoll(value.substr(begin, end - begin)));
      begin = end + 1;
    }
    return numbers;
  }

 private:
  std::map<std::string, std::string> values_;
};

template <class Pe>
void run_side_by_side(const std::vector<std::unique_ptr<Pe>>& pes) {
  std::vector<std::thread> threads;
  for (const auto& pe : pes) threads.emplace_back([&pe] { pe->run(); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace driver
