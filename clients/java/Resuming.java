import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.TimeUnit;
import specdec.v1.Generation.Finish;
import specdec.v1.Generation.GenerateRequest;
import specdec.v1.Generation.GenerateResponse;
import specdec.v1.Generation.ResumeRequest;
import specdec.v1.Generation.ResumeResponse;
import specdec.v1.Generation.TokenOrigin;
import specdec.v1.GenerationServiceGrpc;
import specdec.v1.GenerationServiceGrpc.GenerationServiceBlockingStub;
import specdec.v1.Types.SamplingParams;
import specdec.v1.Types.SpeculationParams;

/** Generates a text and prints it as it comes; a stream that breaks is resumed where it broke. */
public final class Resuming {
  private static final int MAX_HANDED_BACK = 16384; // tokens that a ResumeRequest may hold

  private final List<Integer> tokens = new ArrayList<>();
  private final List<TokenOrigin> origins = new ArrayList<>();
  private GenerateResponse last;

  /** Prints what is new in a chunk and keeps it. */
  private void add(GenerateResponse chunk) {
    int known = tokens.size() - chunk.getOffset();
    int count = chunk.getTokensCount();
    if (known < 0) {
      throw lost("tokens are missing: the chunk begins at " + chunk.getOffset() + ", and " + tokens.size() + " have come");
    }
    for (int i = 0; i < Math.min(known, count); i++) {
      if (chunk.getTokens(i) != tokens.get(chunk.getOffset() + i)) {
        throw lost("token " + (chunk.getOffset() + i) + " is not the one that came before");
      }
    }
    if (known > 0 && known == count && !chunk.getDigest().equals(last.getDigest())) {
      throw lost("the digest is not the one that came before");
    }
    if (known > count || (known == count && !chunk.hasFinish())) {
      return; // nothing is new
    }
    String text = chunk.getText();
    int begin = known > 0 ? chunk.getTextEnds(known - 1) : 0; // in code points
    System.out.print(text.substring(text.offsetByCodePoints(0, begin)));
    System.out.flush();
    tokens.addAll(chunk.getTokensList().subList(known, count));
    origins.addAll(chunk.getOriginsList().subList(known, count));
    last = chunk;
  }

  private static StatusRuntimeException lost(String what) {
    return Status.DATA_LOSS.withDescription(what).asRuntimeException();
  }

  /** Asks for what comes after the tokens that have come. */
  private ResumeRequest resumption() {
    int from = Math.max(0, tokens.size() - MAX_HANDED_BACK);
    return ResumeRequest.newBuilder()
        .setSessionId(last.getSessionId())
        .setOffset(tokens.size())
        .setDigest(last.getDigest())
        .setProof(last.getProof())
        .addAllTokens(tokens.subList(from, tokens.size()))
        .addAllOrigins(origins.subList(from, origins.size()))
        .build();
  }

  /** Reads one stream to its end, and throws unless the session has finished. */
  private void attempt(GenerationServiceBlockingStub client, GenerateRequest request) {
    if (last == null) {
      client.generate(request).forEachRemaining(this::add);
    } else {
      Iterator<ResumeResponse> responses = client.resume(resumption());
      responses.forEachRemaining(response -> add(response.getChunk()));
    }
    if (last == null || !last.hasFinish()) {
      throw Status.UNAVAILABLE.withDescription("the stream ended before the text did").asRuntimeException();
    }
  }

  /** Returns the pause in ms that a server asks for before the next attempt, or -1: no other attempt. */
  private static long pauseAfter(StatusRuntimeException failure) throws InvalidProtocolBufferException {
    boolean fromSpecdec = false;
    long pause = -1;
    for (Any detail : StatusProto.fromThrowable(failure).getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        fromSpecdec |= detail.unpack(ErrorInfo.class).getDomain().equals("specdec");
      } else if (detail.is(RetryInfo.class)) {
        var delay = detail.unpack(RetryInfo.class).getRetryDelay();
        pause = delay.getSeconds() * 1000 + delay.getNanos() / 1_000_000;
      }
    }
    switch (failure.getStatus().getCode()) {
      case UNAVAILABLE:
      case ABORTED:
        return Math.max(0, pause);
      case RESOURCE_EXHAUSTED:
        return pause;
      case CANCELLED: // proxies send these for broken connections
      case UNKNOWN:
      case INTERNAL:
        return fromSpecdec ? -1 : 0;
      default:
        return -1;
    }
  }

  private Finish run(GenerationServiceBlockingStub client, GenerateRequest request)
      throws InvalidProtocolBufferException, InterruptedException {
    long backoff = 100;
    while (true) {
      int before = tokens.size();
      try {
        attempt(client, request);
        return last.getFinish();
      } catch (StatusRuntimeException failure) {
        long pause = pauseAfter(failure);
        if (pause < 0) {
          throw failure;
        }
        backoff = tokens.size() > before ? 100 : backoff;
        System.err.println("broken after " + tokens.size() + " tokens: " + failure.getMessage());
        Thread.sleep(pause + backoff);
        backoff = Math.min(2 * backoff, 5000);
      }
    }
  }

  /** Takes an address, a prompt, a request id and a seed. */
  public static void main(String[] arguments) throws Exception {
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setText(arguments[1])
            .setRequestId(arguments[2]) // the same one in every attempt
            .setSampling(
                SamplingParams.newBuilder()
                    .setSeed(Long.parseUnsignedLong(arguments[3]))
                    .setMaxNewTokens(200)
                    .setIgnoreEos(true))
            // both may be left out: the service chooses; with fixed ones a seed repeats its text
            .setSpeculation(SpeculationParams.newBuilder().setNumDraftTokens(4).setDrafter("model"))
            .build();
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build(); // for loopback
    try {
      Resuming text = new Resuming();
      Finish finish =
          text.run(GenerationServiceGrpc.newBlockingStub(channel).withDeadlineAfter(2, TimeUnit.MINUTES), request);
      System.err.println(finish.getReason() + ", " + text.tokens.size() + " tokens");
    } finally {
      channel.shutdownNow();
    }
  }
}
