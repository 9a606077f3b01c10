// Measures the offsets between the PEs' clocks. PE 0 asks each other PE for its time in many rounds, and notes when it
// asked, what the peer answered, and when the answer came. The quickest round is the most accurate: the answer is from
// its middle, give or take half its duration.
#pragma once

#include "comm/launch.cuh"
#include "platform/entry.cuh"

namespace po::clock_alignment {

inline constexpr int kRounds = 64;
inline constexpr int kThreads = 32;  // on the GPU
PO_CONSTANT(kRounds)
PO_CONSTANT(kThreads)

inline constexpr Phase kPhaseQuestion = make_phase(kFirstPhase);
inline constexpr Phase kPhaseAnswer = make_phase(kFirstPhase + 1);
PO_CONSTANT(kPhaseQuestion)
PO_CONSTANT(kPhaseAnswer)

struct Plan {
  Team team;
  uint64_t words_offset;  // Words[size] in every heap, indexed by the PE that answers
};
PO_DESCRIBE(Plan, team, words_offset)

struct Words {
  uint64_t question;  // rounds that PE 0 has asked for
  uint64_t answer;    // rounds that the peer has answered
  uint64_t time;      // the peer's answer
};
PO_DESCRIBE(Words, question, answer, time)

// In nanoseconds.
struct Sample {
  uint64_t asked;  // by PE 0's clock
  uint64_t told;   // by the other PE's clock
  uint64_t heard;
};
PO_DESCRIBE(Sample, asked, told, heard)

struct Call {
  Sample* samples;  // [size][kRounds]; on PE 0
};
PO_DESCRIBE(Call, samples)

struct Shared {
  Plan plan;
  uint64_t is_last;
};

struct Kernel {
  using Plan = clock_alignment::Plan;
  using Call = clock_alignment::Call;
  using Shared = clock_alignment::Shared;
  static constexpr int kThreads = clock_alignment::kThreads;
  static constexpr int kBlocksPerSm = 1;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    const Team& team = plan.team;
    begin_launch(shared.plan.team, wg);
    grant_credit(team, wg, 0);
    if (wg.rank() == 0) {
      if (team.rank == 0) {
        for (int pe = 1; pe < team.size && ask(plan, pe, call.samples + pe * kRounds); ++pe) {
        }
      } else {
        answer(plan);
      }
    }
    await_all_credits(team, wg);
    leave_launch(team, wg, &shared.is_last, 0, 0);
  }

 private:
  static PO_FN uint64_t place(const Plan& plan, int pe) {
    return plan.words_offset + static_cast<uint64_t>(pe) * sizeof(Words);
  }

  static PO_FN bool ask(const Plan& plan, int pe, Sample* samples) {
    const Team& team = plan.team;
    if (!await_credit(team, pe)) return false;
    const auto* words = reinterpret_cast<const Words*>(team.heap + place(plan, pe));
    for (uint64_t round = 1; round <= kRounds; ++round) {
      const uint64_t asked = clock_ns();
      signal(team, pe, place(plan, pe) + kQuestion, flag_value(team.epoch, round));
      if (!await_step(team, &words->answer, round, kPhaseAnswer, pe, round)) return false;
      const uint64_t heard = clock_ns();
      samples[round - 1] = {asked, flag_load_relaxed_sys(&words->time), heard};
    }
    return true;
  }

  static PO_FN void answer(const Plan& plan) {
    const Team& team = plan.team;
    if (!await_credit(team, 0)) return;
    const uint64_t own = place(plan, team.rank);
    for (uint64_t round = 1; round <= kRounds; ++round) {
      const uint64_t* question = local_word(team, own + kQuestion);
      if (!await_step(team, question, round, kPhaseQuestion, 0, round)) return;
      const uint64_t now = clock_ns();
      if (kPuts && !is_reachable(team, 0)) {
        uint64_t* source = local_word(team, own + kTime);  // free again: PE 0 asks after the last answer
        flag_store_release_sys(source, now);
        put_signal(team, 0, own + kTime, source, sizeof(now), own + kAnswer, flag_value(team.epoch, round));
        continue;
      }
      signal(team, 0, own + kTime, now);
      signal(team, 0, own + kAnswer, flag_value(team.epoch, round));
    }
  }

  static constexpr uint64_t kQuestion = 0;
  static constexpr uint64_t kAnswer = sizeof(uint64_t);
  static constexpr uint64_t kTime = 2 * sizeof(uint64_t);
};

}  // namespace po::clock_alignment
