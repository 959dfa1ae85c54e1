(** * Challenger masking, Algorithm 3 (core/algorithms.py, challenger_rounds)

    The order of the masks is a parameter. Each round removes one mask, so the rounds end. *)

From Coq Require Import List Bool Arith Lia Permutation.
From PatchCleanser Require Import Images RowCertificate.
Import ListNotations.

(** ** The algorithm *)

Fixpoint remove_mask (i : nat) (masks : list nat) : list nat :=
  match masks with
  | [] => []
  | j :: rest => if i =? j then rest else j :: remove_mask i rest
  end.

(** The first remaining mask whose label differs challenges the candidate. The result: the last candidate, and the
    number of rounds. *)
Fixpoint challenge
    (fuel : nat) (labels : list label) (pair : nat -> nat -> label) (candidate : nat) (remaining : list nat)
    : nat * nat :=
  match fuel, find (fun i => negb (nth i labels 0 =? nth candidate labels 0)) remaining with
  | S fuel, Some challenger =>
    let wins := pair challenger candidate =? nth challenger labels 0 in
    let next := if wins then challenger else candidate in
    let (last, rounds) := challenge fuel labels pair next (remove_mask challenger remaining) in
    (last, S rounds)
  | _, _ => (candidate, 0)
  end.

Definition challenger_masking (order : list nat) (labels : list label) (pair : nat -> nat -> label) : label * nat :=
  match order with
  | [] => (0, 0)
  | candidate :: remaining =>
    let (last, rounds) := challenge (length remaining) labels pair candidate remaining in
    (nth last labels 0, rounds)
  end.

(** ** A good mask never loses *)

Lemma removed_mask_was_the_only_one : forall i j masks, In i masks -> i <> j -> In i (remove_mask j masks).
Proof.
  intros i j masks. induction masks as [|k rest IH]; simpl; [tauto|].
  intros [E|H] Hne; destruct (Nat.eqb_spec j k); subst; simpl; try tauto; congruence.
Qed.

Lemma remove_mask_shortens : forall j masks, In j masks -> S (length (remove_mask j masks)) = length masks.
Proof.
  intros j masks. induction masks as [|k rest IH]; simpl; [tauto|].
  intros H. destruct (Nat.eqb_spec j k); [reflexivity|]. simpl. f_equal. apply IH. destruct H; congruence.
Qed.

Lemma a_good_mask_never_loses : forall labels pair i y fuel candidate remaining,
  nth i labels 0 = y ->
  (forall j, In j (candidate :: remaining) -> pair i j = y /\ pair j i = y) ->
  In i (candidate :: remaining) ->
  length remaining <= fuel ->
  nth (fst (challenge fuel labels pair candidate remaining)) labels 0 = y.
Proof.
  intros labels pair i y fuel. induction fuel as [|fuel IH]; intros candidate remaining Hlabel Hpair Hin Hfuel; simpl.
  - (* No mask remains: i is the candidate. *)
    destruct remaining; [|simpl in Hfuel; lia]. destruct Hin as [->|[]]. assumption.
  - destruct (find _ remaining) as [challenger|] eqn:Hfind.
    + apply find_some in Hfind. destruct Hfind as [Hin' Hdiffer].
      apply negb_true_iff, Nat.eqb_neq in Hdiffer.
      assert (Hwins : i = challenger -> pair challenger candidate = nth challenger labels 0).
      { intros <-. rewrite Hlabel. apply Hpair. now left. }
      assert (Hstays : i = candidate -> pair challenger candidate <> nth challenger labels 0).
      { intros <-. replace (pair challenger i) with y; [congruence|]. symmetry. apply Hpair. now right. }
      remember (if pair challenger candidate =? nth challenger labels 0 then challenger else candidate) as next.
      destruct (challenge fuel labels pair next (remove_mask challenger remaining)) as [last rounds] eqn:E. simpl.
      replace last with (fst (challenge fuel labels pair next (remove_mask challenger remaining))) by now rewrite E.
      assert (Hnext : In next (candidate :: remaining)).
      { subst next. destruct (Nat.eqb_spec (pair challenger candidate) (nth challenger labels 0)); simpl; auto. }
      apply IH; auto.
      * intros j [<-|Hj]; apply Hpair; [assumption|]. right. revert Hj. clear. induction remaining; simpl; [tauto|].
        destruct (challenger =? a); simpl; tauto.
      * destruct (Nat.eq_dec i next); [now left|]. right.
        destruct (Nat.eqb_spec (pair challenger candidate) (nth challenger labels 0)); subst next;
          destruct Hin as [->|Hin]; try (exfalso; tauto); try (apply removed_mask_was_the_only_one; auto).
      * apply remove_mask_shortens in Hin'. lia.
    + (* No label differs from the candidate's, so it is y. *)
      simpl. destruct Hin as [->|Hin]; [assumption|].
      apply find_none with (x := i) in Hfind; [|assumption].
      apply negb_false_iff, Nat.eqb_eq in Hfind. congruence.
Qed.

Theorem at_most_one_round_for_each_mask : forall order labels pair,
  snd (challenger_masking order labels pair) <= length order - 1.
Proof.
  intros order labels pair. destruct order as [|candidate remaining]; simpl; [lia|].
  assert (H : forall fuel c r, snd (challenge fuel labels pair c r) <= fuel).
  { induction fuel as [|fuel IH]; intros c r; simpl; [lia|].
    destruct (find _ r) as [challenger|]; simpl; [|lia].
    match goal with |- context [challenge fuel ?l ?p ?c ?r] => specialize (IH c r); destruct (challenge fuel l p c r)
    end.
    simpl in *. lia. }
  specialize (H (length remaining) candidate remaining).
  destruct (challenge _ _ _ _ _). simpl in *. lia.
Qed.

(** ** The theorem *)

Section Soundness.
  Context {pixel value : Type}.
  Variable masks : list (region pixel).
  Variable labels : image pixel value -> table label.
  Variable order : list nat.
  Hypothesis order_has_every_mask : Permutation order (seq 0 (length masks)).

  Definition answer_of_challenger_masking (x : image pixel value) : label :=
    fst (challenger_masking order (one_mask_labels masks labels x) (labels x)).

  Lemma challenger_masking_answers_a_good_row : forall x y,
    two_masks_commute labels -> (exists i, i < length masks /\ good masks labels x y i) ->
    answer_of_challenger_masking x = y.
  Proof.
    intros x y Hcommute [i [Hi Hgood]].
    assert (Hin : forall j, In j order <-> j < length masks).
    { intro j. rewrite order_has_every_mask. rewrite in_seq. lia. }
    unfold answer_of_challenger_masking, challenger_masking.
    apply Hin in Hi as Horder. destruct order as [|candidate remaining]; [destruct Horder|].
    pose proof (a_good_mask_never_loses (one_mask_labels masks labels x) (labels x) i y
      (length remaining) candidate remaining) as H.
    destruct (challenge _ _ _ _ _) as [last rounds]. apply H; auto.
    - rewrite one_mask_label_number by assumption. now apply Hgood.
    - intros j Hj. apply Hin in Hj. split; [now apply Hgood|].
      rewrite Hcommute. now apply Hgood.
  Qed.

  Hypothesis visible : function_of_visible masks labels.
  Variable R : threat pixel.

  Theorem challenger_masking_keeps_the_label : forall x y,
    row_certified masks labels R x y -> forall x', attacked R x x' -> answer_of_challenger_masking x' = y.
  Proof.
    intros x y Hcert x' Hattack. apply challenger_masking_answers_a_good_row; [apply visible|].
    now apply some_good_row_survives_the_attack with (R := R) (x := x).
  Qed.

  Theorem two_mask_correctness_certifies_challenger_masking : forall x y,
    covers masks R -> two_mask_correct masks labels x y ->
    forall x', attacked R x x' -> answer_of_challenger_masking x' = y.
  Proof.
    intros x y Hcovers Hcorrect. apply challenger_masking_keeps_the_label.
    now apply two_mask_correctness_implies_the_row_certificate.
  Qed.
End Soundness.
